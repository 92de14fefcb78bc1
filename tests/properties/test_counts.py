"""How often a hook fires is what a count with the framework's own hooks says, for every kind and whatever the model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tenterhook as th
from tenterhook.backends.torch import BACKEND
from tenterhook.values import leaves
from tests.properties.test_nothing_changed import EXAMPLES, RUNS, _bare, _run
from tests.properties.trees import Spec, build, specs

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning",  # torch, of reentrant checkpoints
    "ignore:torch.utils.checkpoint:UserWarning",
)


class Reference:
    """Counts with plain forward hooks, and with plain hooks on every tensor of an output and on every parameter.

    Calls: those outside of a backward pass. Backward: calls, first runs and repeated ones, of whose outputs a gradient came to
    any. Parameters: passes in which ``.grad`` was added to; the test begins one for each call of the root. Tensors: gradients.
    """

    def __init__(self, net: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.tensors: Counter[str] = Counter()
        self._passes: set[tuple[int, str]] = set()
        self._handles: list[Any] = [
            module.register_forward_hook(lambda module, args, output, name=name: self._called(name, output))
            for name, module in net.named_modules()
        ]
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda parameter, name=name: self._passes.add((self.calls[""], name))
                    )
                )
                self._handles.append(parameter.register_hook(lambda gradient, name=name: self.tensors.update([name])))

    @property
    def parameters(self) -> Counter[str]:
        return Counter(name for _, name in self._passes)

    def _called(self, name: str, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.calls[name] += 1
        came: list[str] = []

        def arrived(gradient: Tensor) -> None:
            if not came:
                came.append(name)
                self.backward[name] += 1

        for _, tensor in leaves(output, BACKEND.tensor_types):
            if tensor.requires_grad:
                (tensor if tensor._base is None or not tensor.is_leaf else tensor).register_hook(arrived)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextlib.contextmanager
def _counting(net: nn.Module) -> Iterator[tuple[Reference, th.hookset.HookSet]]:
    reference = Reference(net)
    try:
        with th.hooks(net) as hooks:
            yield reference, hooks
    finally:
        reference.remove()


def _fired(handle: Any) -> Counter[str]:
    return Counter({site.path: site.fired for site in handle.sites if site.fired})


def _ignore(*arguments: Any) -> None:
    """A callback that looks."""


@EXAMPLES
@given(spec=specs(), run=RUNS, kind=st.sampled_from(["forward_pre", "forward", "backward_pre", "backward"]))
def test_hooks_on_modules_fire_as_often_as_plain_ones(spec: Spec, run: dict[str, bool], kind: str) -> None:
    _bare(spec, run)
    net = build(spec)
    with _counting(net) as (reference, hooks):
        handle = getattr(hooks, kind)("**", _ignore)
        _run(net, **run)
    assert _fired(handle) == (reference.calls if kind.startswith("forward") else reference.backward)


@EXAMPLES
@given(spec=specs(), run=RUNS, accumulated=st.booleans())
def test_parameter_hooks_fire_once_a_pass(spec: Spec, run: dict[str, bool], accumulated: bool) -> None:
    _bare(spec, run)
    net = build(spec)
    if next(net.parameters(), None) is None:
        return
    with _counting(net) as (reference, hooks):
        handle = hooks.param_grad("**", _ignore, accumulated=accumulated)
        _run(net, **run)
    assert _fired(handle) == reference.parameters


@EXAMPLES
@given(spec=specs(), run=RUNS)
def test_tensor_hooks_fire_as_often_as_plain_ones(spec: Spec, run: dict[str, bool]) -> None:
    _bare(spec, run)
    net = build(spec)
    with _counting(net) as (reference, hooks):
        handles = {
            name: hooks.tensor(parameter, _ignore)
            for name, parameter in net.named_parameters()
            if parameter.requires_grad
        }
        _run(net, **run)
    assert Counter({name: handle.fired for name, handle in handles.items() if handle.fired}) == reference.tensors
