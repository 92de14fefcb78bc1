"""Recorded arrays as MindSpore tensors, and live MindSpore tensors through a file."""

from __future__ import annotations

from pathlib import Path

import mindspore
import numpy as np
import pytest

from tenterhook.backends import loaded_backends
from tenterhook.recording import MemorySink, Recording, converters, open_recording
from tests.recording.synthetic import call, calls_batch, value, values_batch


@pytest.mark.parametrize(
    "dtype", [mindspore.float32, mindspore.float16, mindspore.bfloat16, mindspore.int32, mindspore.bool_], ids=str
)
def test_a_tensor_comes_through_memory_and_file_bit_for_bit(tmp_path: Path, dtype: mindspore.Type) -> None:
    assert loaded_backends()
    tensor = mindspore.Tensor(np.arange(6).reshape(2, 3)).astype(dtype)
    sink = MemorySink()
    sink.write_calls(calls_batch(call(0)))
    sink.write_tensor("t", tensor)
    sink.write_values(values_batch(value(1, 0, tensor="t")))
    live = Recording(sink)
    assert live["conv1"].output is tensor
    live.save(tmp_path / "a.thk")
    array = open_recording(tmp_path / "a.thk")["conv1"].output
    again = converters.from_numpy(array, "mindspore")
    assert again.dtype == dtype and again.shape == (2, 3)
    assert converters.to_numpy(again).tobytes() == converters.to_numpy(tensor).tobytes() == array.tobytes()
