"""Cells for the tests of the backend, each with one of the traits that MindSpore's own hooks stumble over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

__all__ = ["Block", "Square", "WithBprop", "WritesIntoItsInput", "dense", "gradients", "net", "ones", "tensor"]


def tensor(*values: float) -> ms.Tensor:
    return ms.Tensor(np.float32(values))


def ones(*shape: int) -> ms.Tensor:
    return ms.Tensor(np.ones(shape, np.float32))


def dense(weight: float) -> nn.Dense:
    layer = nn.Dense(1, 1, has_bias=False)
    layer.weight.set_data(ms.Tensor(np.float32([[weight]])))
    return layer


def net() -> nn.SequentialCell:
    return nn.SequentialCell(nn.Dense(3, 4), nn.ReLU(), nn.SequentialCell(nn.Dense(4, 2)))


def gradients(fn: Callable[..., Any], *inputs: ms.Tensor) -> list[float]:
    """The gradients of ``fn(*inputs).sum()`` with respect to the inputs, each of which holds one number."""
    of_inputs = ms.grad(lambda *tensors: fn(*tensors).sum(), tuple(range(len(inputs))))(*inputs)
    found = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
    return [float(gradient.asnumpy().item()) for gradient in found]


class WithBprop(nn.Cell):
    """A cell with a backward pass of its own, which is not the true one."""

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return x * 2

    def bprop(self, x: ms.Tensor, out: ms.Tensor, dout: ms.Tensor) -> tuple[ms.Tensor]:
        return (dout * 7,)


class WritesIntoItsInput(nn.Cell):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x[0] = 5.0
        return x * 3


class Square(nn.Cell):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return x * x


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 3)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return ops.relu(self.fc(x))
