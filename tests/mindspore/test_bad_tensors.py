"""Whatever flows through cells has its row: its values, or null and a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from mindspore import nn, ops

import tenterhook as th
from tenterhook.stats import STATISTICS, describe

BASE = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
NUMBERS = np.array([[1.0, 0.5, 0.0], [2.0, 0.0, -3.0]])

VALUES: dict[str, tuple[Callable[[], ms.Tensor], np.ndarray]] = {
    "transposed": (lambda: ms.Tensor(BASE).transpose(2, 1, 0), BASE.transpose(2, 1, 0)),
    "a column": (lambda: ms.Tensor(BASE)[:, 1, 2], BASE[:, 1, 2]),
    "expanded": (
        lambda: ms.Tensor(BASE)[:1, :, :1].broadcast_to((5, 3, 4)),
        np.broadcast_to(BASE[:1, :, :1], (5, 3, 4)),
    ),
    "0-d": (lambda: ms.Tensor(-3.5), np.float32(-3.5)),
    "empty": (lambda: ms.Tensor(np.zeros((0, 4), np.float32)), np.zeros((0, 4), np.float32)),
    "not finite": (
        lambda: ms.Tensor(np.array([np.nan, np.inf, -np.inf, 1, -0.0], np.float32)),
        np.array([np.nan, np.inf, -np.inf, 1, -0.0], np.float32),
    ),
    "a parameter": (lambda: ms.Parameter(ms.Tensor(BASE)), BASE),
}
DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "bool_",
    "complex64",
    "complex128",
]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


class Give(nn.Cell):
    def __init__(self, tensor: ms.Tensor) -> None:
        super().__init__()
        self.held = [tensor]

    def construct(self, x: Any) -> ms.Tensor:
        return self.held[0]


def row_of(tensor: ms.Tensor) -> dict[str, Any]:
    cell = Give(tensor)
    with th.record(cell, kinds=["output"], on_error="raise") as rec:
        assert cell(ms.Tensor(1.0)) is tensor
    (row,) = rec.table("values").to_pylist()
    return row


def assert_described(row: dict[str, Any], array: np.ndarray) -> None:
    expected = describe(array)
    assert (row["shape"], row["note"], row["digest"]) == (list(array.shape), None, expected["digest"])
    assert [row[name] for name in STATISTICS] == [expected[name] for name in STATISTICS]
    assert row["sketch"] == expected["sketch"].tolist()


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    make, array = VALUES[name]
    assert_described(row_of(make()), np.asarray(array))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str) -> None:
    numbers = np.abs(NUMBERS) if name.startswith("u") else NUMBERS
    kind = getattr(ml_dtypes, name, None) or getattr(np, name)
    tensor = ms.Tensor(numbers.astype(kind) if kind not in vars(ml_dtypes).values() else numbers, getattr(ms, name))
    assert_described(row_of(tensor), numbers.astype(kind))


def test_null_and_a_reason() -> None:
    for tensor, note in (
        (ms.Tensor(np.array(["a", "b"])), "no statistics for dtype string"),
        (ms.Tensor(NUMBERS, ms.hifloat8), "no statistics for dtype hifloat8"),
    ):
        row = row_of(tensor)
        assert row["note"] == note
        assert all(row[column] is None for column in (*STATISTICS, "sketch", "digest"))


def test_memory_that_is_gone_when_the_recording_is_read() -> None:
    cell = nn.SequentialCell(nn.ReLU(), nn.ReLU())
    with th.record(cell, kinds=["output"], on_error="raise") as rec:
        for step in range(10):
            out = cell(ops.full((100_000,), float(step + 1)))
            del out
            ops.full((100_000,), 1e9)
    rows = rec.table("values").to_pylist()
    assert [row["mean"] for row in rows if row["path"] == "1"] == [step + 1.0 for step in range(10)]
