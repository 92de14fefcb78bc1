"""Nested values, slots, calls, steps, and edits that are removed on the way: equal to the edits in the model's own code, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenterhook as th
from tenterhook.backends import find_backend
from tenterhook.values import get_slot, leaves, rebuild
from tests.contract.adapters.base import Adapter

WIDTH = 2
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda v: v * 1.5,
    "shift": lambda v: v + 0.25,
    "clamp": lambda v: v.clamp(-0.5, 0.5),
    "square": lambda v: v * v * 0.5,
    "nothing": lambda v: None,
}
CONTAINERS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "tensor": (lambda y: y, ("",)),
    "tuple": (lambda y: (y, y * 0.5), ("[0]", "[1]")),
    "list": (lambda y: [y * 2, None, y], ("[0]", "[2]")),
    "dict": (lambda y: {"h": y, "more": {"k": y + 1}}, ('["h"]', '["more"]["k"]')),
    "mixed": (lambda y: (y, {"text": "t", "inner": (y - 1, None)}), ("[0]", '[1]["inner"][0]')),
}
"""How a tensor is wrapped -> the function, and the slots of its tensors."""


@dataclass(frozen=True)
class Box:
    container: str
    repeats: int


@dataclass(frozen=True)
class Edit:
    box: int
    kind: str
    function: str
    slot: str | None  # None: all tensors, each by itself
    call: int | None
    step: int | None
    removed: int | None  # after which step


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[Box], list[Edit]]:
    boxes = draw(
        st.lists(st.builds(Box, st.sampled_from(sorted(CONTAINERS)), st.integers(1, 3)), min_size=1, max_size=3)
    )
    edits = []
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(boxes) - 1))
        kind = draw(st.sampled_from(["input", "output", "grad_input", "grad_output"]))
        slots = CONTAINERS[boxes[number].container][1] if "output" in kind else ()
        some = st.none() | st.integers(0, 2)
        slot = draw(st.none() | st.sampled_from(slots)) if slots else None
        function = draw(st.sampled_from(sorted(FUNCTIONS)))
        edits.append(Edit(number, kind, function, slot or None, draw(some), draw(some), draw(some)))
    return boxes, edits


class _Written:
    """The edits, written into the code around a box."""

    def __init__(self, edits: list[Edit], types: tuple[type, ...]) -> None:
        self.edits, self.types = edits, types
        self.step = 0
        self.calls: Counter[int] = Counter()

    def call(self, number: int, box: Any, x: Any) -> Any:
        call, self.calls[number] = self.calls[number], self.calls[number] + 1
        here = [
            edit
            for edit in self.edits
            if (edit.box, edit.call in (None, call), edit.step in (None, self.step)) == (number, True, True)
            and (edit.removed is None or self.step <= edit.removed)
        ]
        x = self.changed(x, [edit for edit in here if edit.kind == "input"])
        x = self.alias(box, x, [edit for edit in here if edit.kind == "grad_input"])
        y = self.changed(box(x), [edit for edit in here if edit.kind == "output"])
        backend = find_backend(box)
        for edit in here:
            for slot, tensor in leaves(y, self.types) if edit.kind == "grad_output" else ():
                if edit.slot in (None, slot) and backend.wants_gradient(tensor):
                    tensor.register_hook(FUNCTIONS[edit.function])  # also of what the box has made of it meanwhile
        return y

    def changed(self, value: Any, edits: list[Edit]) -> Any:
        for edit in edits:
            slots = [slot for slot, _ in leaves(value, self.types)] if edit.slot is None else [edit.slot]
            new = {slot: FUNCTIONS[edit.function](get_slot(value, slot)) for slot in slots}
            value = rebuild(value, {slot: one for slot, one in new.items() if one is not None})
        return value

    def alias(self, box: Any, value: Any, edits: list[Edit]) -> Any:
        backend, made, new = find_backend(box), {}, {}
        for slot, tensor in leaves(value, self.types) if edits else ():
            if backend.wants_gradient(tensor):
                if id(tensor) not in made:
                    made[id(tensor)] = tensor.view(tensor.shape)
                    for edit in edits:
                        made[id(tensor)].register_hook(FUNCTIONS[edit.function])
                new[slot] = made[id(tensor)]
        return rebuild(value, new)


def _build(fw: Adapter, boxes: list[Box], call: Callable[[int, Any, Any], Any]) -> Any:
    random = np.random.default_rng(len(boxes))
    made = {}
    for number, box in enumerate(boxes):
        weight, bias = (
            random.normal(size=(WIDTH, WIDTH)).astype(np.float32),
            random.normal(size=WIDTH).astype(np.float32),
        )
        wrap = CONTAINERS[box.container][0]

        def forward(self: Any, x: Any, wrap: Callable[[Any], Any] = wrap) -> Any:
            return wrap(self.layer(_total(self, x)))

        made[f"box{number}"] = fw.module(
            "Box", lambda self, x, forward=forward: forward(self, x), layer=fw.linear(weight, bias)
        )

    def run(self: Any, x: Any) -> Any:
        for number, box in enumerate(boxes):
            for _ in range(box.repeats):
                x = call(number, getattr(self, f"box{number}"), x)
        return _total(self, x)

    return fw.module("Net", run, **made)


def _total(module: Any, value: Any) -> Any:
    (_, first), *rest = leaves(value, find_backend(module).tensor_types)
    for _, tensor in rest:
        first = first + tensor
    return first


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=_cases(), steps=st.integers(1, 3), observed=st.booleans())
def test_edits_of_nested_values(fw: Adapter, case: tuple[list[Box], list[Edit]], steps: int, observed: bool) -> None:
    boxes, edits = case
    net = _build(fw, boxes, lambda number, box, x: box(x))
    types = find_backend(net).tensor_types
    code = _Written(edits, types)
    written = _build(fw, boxes, code.call)
    x = np.random.default_rng(steps).normal(size=(2, WIDTH)).astype(np.float32)
    editor, recorder = th.edit(net).start(), th.record(net).start() if observed else None
    try:
        handles = [_register(editor, edit) for edit in edits]
        for step in range(steps):
            code.step = step
            code.calls.clear()
            expected = fw.run(written, lambda x: (written(x) * 0.5).sum(), [x], wrt_inputs=True)
            run = fw.run(net, lambda x: (net(x) * 0.5).sum(), [x], wrt_inputs=True)
            editor.step()
            assert run.loss == expected.loss
            np.testing.assert_array_equal(run.inputs[0], expected.inputs[0])
            assert run.parameters.keys() == expected.parameters.keys()
            for name, gradient in run.parameters.items():
                np.testing.assert_array_equal(gradient, expected.parameters[name], err_msg=name)
            for handle, edit in zip(handles, edits, strict=True):
                if edit.removed == step:
                    handle.remove()
    finally:
        for handle in editor._handles:
            handle.sites[0].fired += not handle.fired  # that some never run is no matter here
        editor.close()
        if recorder is not None:
            recorder.close()


def _register(editor: th.Editor, edit: Edit) -> Any:
    slot = "**" if edit.slot is None and edit.kind in ("input", "output") else edit.slot
    register = getattr(editor, edit.kind)
    return register(f"box{edit.box}", FUNCTIONS[edit.function], slot=slot, call=edit.call, step=edit.step)
