"""Over random networks of cells: watched runs equal bare ones, bit for bit: losses, gradients, parameters, running statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import nn, ops

import tenterhook as th

WIDTH = 4
ALL = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]


@dataclass(frozen=True)
class Block:
    """A layer, or a container of blocks."""

    what: str
    inside: tuple[Block, ...] = ()

    @property
    def reuses(self) -> bool:
        """Whether some tensor is used in several places, so that its gradient is a sum whose order aliases change."""
        return self.what in ("residual", "twice", "dict") or any(one.reuses for one in self.inside)


class Holding(nn.Cell):
    """A cell around others."""

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.inner = inner


class Residual(Holding):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return x + self.inner(x)


class Twice(Holding):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.inner(self.inner(x))


class Pair(nn.Cell):
    def construct(self, values: dict[str, Any], *, scale: ms.Tensor) -> dict[str, Any]:
        return {"sum": (values["a"] + values["b"]) * scale, "rest": [values["a"], None, 3]}


class Nested(Holding):
    """Dict inputs and outputs, a keyword, and a result that nobody uses."""

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__(inner)
        self.pair = Pair()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        out = self.pair({"a": self.inner(x), "b": ops.relu(x)}, scale=x * 0.5)
        return out["sum"]


class Careful(Holding):
    """Goes on after an exception in a cell."""

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__(inner)
        self.fails = Fails()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        try:
            return self.fails(x)
        except ZeroDivisionError:
            return self.inner(x)


class Fails(nn.Cell):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        raise ZeroDivisionError


LAYERS: dict[str, Callable[[], nn.Cell]] = {
    "dense": lambda: nn.Dense(WIDTH, WIDTH),
    "frozen": lambda: _frozen(nn.Dense(WIDTH, WIDTH)),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm((WIDTH,)),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(p=0.0),
}


def _frozen(cell: nn.Cell) -> nn.Cell:
    for parameter in cell.get_parameters():
        parameter.requires_grad = False
    return cell


def _recomputed(cell: nn.Cell) -> nn.Cell:
    cell.recompute()
    return cell


CONTAINERS: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "chain": lambda inner: inner,
    "residual": Residual,
    "twice": Twice,
    "dict": Nested,
    "careful": Careful,
    "recompute": _recomputed,
}


_blocks = st.recursive(
    st.builds(Block, st.sampled_from(sorted(LAYERS))),
    lambda inner: st.builds(
        Block, st.sampled_from(sorted(CONTAINERS)), st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


def build(block: Block, seed: int) -> nn.Cell:
    def make(block: Block) -> nn.Cell:
        if block.what in LAYERS:
            return LAYERS[block.what]()
        # what is run again must not be in what is run again: MindSpore refuses it
        return CONTAINERS[block.what](nn.SequentialCell(*(make(one) for one in block.inside)))

    cell = nn.SequentialCell(nn.Dense(WIDTH, WIDTH), make(block))
    random = np.random.default_rng(seed)
    for parameter in cell.get_parameters():
        if "moving" not in parameter.name:
            parameter.set_data(ms.Tensor(random.normal(size=parameter.shape).astype(np.float32)))
    cell.set_train()
    return cell


def holds(block: Block, what: str, inside: str = "") -> bool:
    """Whether a block of one kind is somewhere (inside one of another kind)."""
    if not inside:
        return block.what == what or any(holds(one, what) for one in block.inside)
    if block.what == inside:
        return any(holds(one, what) for one in block.inside)
    return any(holds(one, what, inside) for one in block.inside)


def train(cell: nn.Cell, seed: int, steps: int = 3) -> list[np.ndarray]:
    """Train, and return all that came of it."""
    random = np.random.default_rng(seed + 1)
    optimizer = nn.Adam(cell.trainable_params(), 0.01)
    step = ms.value_and_grad(lambda x: (cell(x) * 0.3).sum(), 0, optimizer.parameters)
    came: list[np.ndarray] = []
    for _ in range(steps):
        loss, (of_input, of_weights) = step(ms.Tensor(random.normal(size=(3, WIDTH)).astype(np.float32)))
        came += [one.asnumpy().copy() for one in (loss, of_input, *of_weights)]
        optimizer(of_weights)
    cell.set_train(False)
    came.append(cell(ms.Tensor(random.normal(size=(3, WIDTH)).astype(np.float32))).asnumpy().copy())
    return came + [parameter.asnumpy().copy() for parameter in cell.get_parameters()]


@contextlib.contextmanager
def watched(cell: nn.Cell, how: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if how == "hooks":
            hooks = stack.enter_context(th.hooks(cell))
            hooks.forward_pre("**", lambda module, args: None)
            hooks.forward("**", lambda module, args, output: None)
            hooks.backward_pre("**", lambda module, out: None)
            hooks.param_grad("**", lambda name, gradient: None)
        elif how == "edit":
            edit = stack.enter_context(th.edit(cell))
            edit.output("**", lambda value: None)
            edit.grad_output("**", lambda value: None, slot="**")
        elif how == "all":
            stack.enter_context(th.record(cell, kinds=ALL, tensors=True))
            stack.enter_context(th.hooks(cell)).backward("**", lambda module, into, out: None)
        else:
            options = {
                "plain": {"kinds": [kind for kind in ALL if kind != "grad_input"], "tensors": True},
                "ops": {"ops": True, "recompute": True},
                "every": {"every": 2},
            }
            stack.enter_context(th.record(cell, **options[how]))
        yield


@pytest.mark.parametrize("how", ["plain", "ops", "every", "hooks", "edit", "all"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(block=_blocks.filter(lambda block: not holds(block, "recompute", "recompute")), seed=st.integers(0, 1000))
def test_a_watched_training_equals_a_bare_one_bit_for_bit(how: str, block: Block, seed: int) -> None:
    expected = train(build(block, seed), seed)
    cell = build(block, seed)
    with watched(cell, how):
        came = train(cell, seed)
    assert len(came) == len(expected)
    for one, other in zip(came, expected, strict=True):
        if how == "all" and block.reuses:  # a sum of gradients in another order
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, other)
    assert th.installed_hooks(cell) == []
