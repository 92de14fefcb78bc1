"""Over random networks: edited runs equal those of the same edits written into the model's own code, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenterhook as th
from tenterhook.backends import find_backend
from tests.contract.adapters.base import Adapter

WIDTH = 3
KINDS = ("input", "output", "grad_input", "grad_output")
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda v: v * 1.5,
    "shift": lambda v: v + 0.25,
    "square": lambda v: v * v,
    "clamp": lambda v: v.clamp(-0.5, 0.5),
    "sum": lambda v: v + v.sum() * 0.125,
}
VALUES = {
    "scale": th.edits.scale(1.5),
    "shift": th.edits.add(0.25),
    "clamp": th.edits.clip_value(0.5),
}


@dataclass(frozen=True)
class Edit:
    kind: str
    function: str
    as_value: bool = False


@dataclass(frozen=True)
class Block:
    """A layer, or a container of blocks: run one after the other, with a residual, twice, or under checkpointing."""

    what: str  # linear, relu, square, chain, residual, twice, checkpoint
    inside: tuple[Block, ...] = ()
    edits: tuple[Edit, ...] = ()


_edits = st.lists(
    st.builds(Edit, st.sampled_from(KINDS), st.sampled_from(sorted(VALUES)), st.booleans())
    | st.builds(Edit, st.sampled_from(KINDS), st.sampled_from(sorted(FUNCTIONS))),
    max_size=2,
).map(tuple)
_layers = st.builds(Block, st.sampled_from(["linear", "relu", "square"]), st.just(()), _edits)
_blocks = st.recursive(
    _layers,
    lambda inner: st.builds(
        Block,
        st.sampled_from(["chain", "residual", "twice", "checkpoint"]),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        _edits,
    ),
    max_leaves=5,
)
_networks = st.lists(_blocks, min_size=1, max_size=3).map(
    lambda blocks: Block("chain", (Block("linear"), *blocks))  # what comes first needs a gradient
)


def build(fw: Adapter, block: Block, *, written: bool, seed: int) -> Any:
    """Make the module of a block; ``written``: with the edits in its code."""
    random = np.random.default_rng(seed)

    def make(block: Block) -> Any:
        inner = [make(one) for one in block.inside]
        if block.what == "linear":
            layer = fw.linear(
                random.normal(size=(WIDTH, WIDTH)).astype(np.float32), random.normal(size=WIDTH).astype(np.float32)
            )
        elif block.what == "relu":
            layer = fw.relu()
        elif block.what == "square":
            layer = fw.module("Square", lambda self, x: x * x * 0.25)
        else:
            layer = fw.sequential(*inner)
            if block.what == "residual":
                layer = fw.module("Residual", lambda self, x: x + self.inner(x), inner=layer)
            elif block.what == "twice":
                layer = fw.module("Twice", lambda self, x: self.inner(self.inner(x)), inner=layer)
            elif block.what == "checkpoint":
                layer = fw.checkpointed(layer)
        if not written:
            return fw.module("Place", lambda self, x: self.it(x), it=layer)
        return fw.module("Place", lambda self, x: _in_code(self.it, x, block.edits), it=layer)

    return make(block)


def _in_code(layer: Any, x: Any, edits: tuple[Edit, ...]) -> Any:
    def of(kind: str) -> list[Callable[[Any], Any]]:
        return [FUNCTIONS[edit.function] for edit in edits if edit.kind == kind]

    for fn in of("input"):
        x = fn(x)
    if of("grad_input") and _tracked(layer, x):
        x = x.view(x.shape)
        for fn in of("grad_input"):
            x.register_hook(fn)
    y = layer(x)
    for fn in of("output"):
        y = fn(y)
    if of("grad_output") and _tracked(layer, y):
        y = y.view(y.shape)  # so that what a container does to the gradient comes before what its last layer does
        for fn in of("grad_output"):
            y.register_hook(fn)
    return y


def _tracked(layer: Any, tensor: Any) -> bool:
    return find_backend(layer).wants_gradient(tensor)


def put_on(editor: th.Editor, block: Block, path: str) -> None:
    for edit in block.edits:
        value = VALUES[edit.function] if edit.as_value else FUNCTIONS[edit.function]
        getattr(editor, edit.kind)(f"{path}it" if path else "it", value)
    container = {"chain": "it.", "residual": "it.inner.", "twice": "it.inner.", "checkpoint": "it.inner."}
    for number, inner in enumerate(block.inside):
        put_on(editor, inner, f"{path}{container[block.what]}{number}.")


def assert_equal(run: Any, other: Any) -> None:
    np.testing.assert_array_equal(run.loss, other.loss)
    assert run.parameters.keys() == other.parameters.keys()
    for name, gradient in run.parameters.items():
        np.testing.assert_array_equal(gradient, other.parameters[name], err_msg=name)
    np.testing.assert_array_equal(run.inputs[0], other.inputs[0])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(block=_networks, seed=st.integers(0, 1000), closes=st.booleans())
def test_edited_runs_equal_the_edit_in_the_models_own_code(fw: Adapter, block: Block, seed: int, closes: bool) -> None:
    x = np.random.default_rng(seed + 1).normal(size=(2, WIDTH)).astype(np.float32)
    written = build(fw, block, written=True, seed=seed)
    expected = fw.run(written, lambda x: (written(x) * 0.5).sum(), [x], wrt_inputs=True)
    net = build(fw, block, written=False, seed=seed)
    has_gradient_edits = "grad" in repr(block)

    if closes and not has_gradient_edits:

        def loss(x: Any) -> Any:
            with th.edit(net) as editor:
                put_on(editor, block, "")
                return (net(x) * 0.5).sum()

        assert_equal(fw.run(net, loss, [x], wrt_inputs=True), expected)
        return
    with th.edit(net) as editor, th.record(net):
        put_on(editor, block, "")
        run = fw.run(net, lambda x: (net(x) * 0.5).sum(), [x], wrt_inputs=True)
    assert_equal(run, expected)
