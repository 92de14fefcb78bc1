"""Recorded arrays as torch tensors, live torch tensors as arrays, and both through a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import tenterhook as th
from tenterhook.errors import UnsupportedError
from tenterhook.recording import DiskSink, Manifest, MemorySink, Recording, open_recording
from tests.recording.synthetic import call, calls_batch, modules_table, value, values_batch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def one_value(sink: MemorySink | DiskSink, tensor: object) -> None:
    sink.write_calls(calls_batch(call(0)))
    sink.write_tensor("t", tensor)
    sink.write_values(values_batch(value(1, 0, tensor="t")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_through_memory_and_file_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    sink = MemorySink()
    one_value(sink, tensor)
    live = Recording(sink)
    assert live["conv1"].output is tensor
    live.save(tmp_path / "a.thk")
    read = open_recording(tmp_path / "a.thk")["conv1"].calls[0].values[0]
    again = read.as_torch()
    assert again.dtype == dtype and again.shape == (2, 3)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))
    again.zero_()  # its own memory: the file is as it was
    assert np.array_equal(read.as_numpy().view(np.uint8), live["conv1"].calls[0].values[0].as_numpy().view(np.uint8))


def test_a_scalar_and_an_empty_tensor_keep_their_shape(tmp_path: Path) -> None:
    for number, tensor in enumerate((torch.tensor(3.0), torch.ones(0, 4))):
        sink = DiskSink(tmp_path / f"{number}.thk", Manifest())
        one_value(sink, tensor)
        sink.close(Manifest(), modules_table())
        read = open_recording(sink.path)["conv1"].calls[0].values[0].as_torch()
        assert read.shape == tensor.shape and torch.equal(read, tensor)


def test_a_dtype_that_torch_has_not_is_said(tmp_path: Path) -> None:
    sink = MemorySink()
    one_value(sink, np.ones(3, ml_dtypes.float8_e4m3b11fnuz))
    with pytest.raises(UnsupportedError, match="torch has no dtype float8_e4m3b11fnuz"):
        Recording(sink)["conv1"].calls[0].values[0].as_torch()


def test_torch_is_imported_only_when_a_tensor_of_it_is_asked_for(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest())
    one_value(sink, np.ones(3, np.float32))
    sink.close(Manifest(), modules_table())
    code = """
import sys, tenterhook as th
value = th.open(sys.argv[1])["conv1"].calls[0].values[0]
assert value.as_numpy().tolist() == [1, 1, 1] and "torch" not in sys.modules
print(value.as_torch())
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.thk"], capture_output=True, text=True, check=False)
    assert done.stdout == "tensor([1., 1., 1.])\n", done.stderr


def test_a_recorded_network_is_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 2))
    given = torch.randn(5, 4)
    with th.record(model, tensors=True) as live:
        model(given).sum().backward()
    model.zero_grad()
    with th.record(model, tensors=True, to=tmp_path / "a.thk"):
        model(given).sum().backward()
    opened = th.open(tmp_path / "a.thk")
    assert [(call.phase, call.path) for call in opened.order()] == [(call.phase, call.path) for call in live.order()]
    assert len(opened.order()) == 8
    for ours, other in zip(live.order(), opened.order(), strict=True):
        mine, theirs = ours.values, other.values
        assert [value.address for value in mine] == [value.address for value in theirs]
        for value_, its in zip(mine, theirs, strict=True):
            assert value_.digest == its.digest and value_.as_numpy().tobytes() == its.as_numpy().tobytes()
