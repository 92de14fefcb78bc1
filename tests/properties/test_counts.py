"""How often a hook fires is what a count with the framework's own hooks says, for every kind and whatever the model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import tenterhook as th
from tenterhook.values import leaves
from tests.properties.test_nothing_changed import EXAMPLES, RUNS, _bare, _run
from tests.properties.trees import Spec, build, specs

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning",  # torch, of reentrant checkpoints
    "ignore:torch.utils.checkpoint:UserWarning",
)


class Reference:
    """Counts with plain hooks around every module, on every tensor of an output and on every parameter.

    Calls: those outside of a backward pass. Outputs: calls, first runs and repeated ones, of whose outputs a gradient came to any.
    Inputs: those of them whose inputs the graph goes on to, or need no gradient. Parameters: passes in which ``.grad`` was added
    to; the test begins one for each call of the root. Tensors: gradients.
    """

    def __init__(self, net: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter()
        self.tensors: Counter[str] = Counter()
        self._passes: set[tuple[int, str]] = set()
        self._running: list[list[Any]] = []
        self._tapped: list[tuple[str, Tensor]] = []  # outputs that are leaves: a repeated call may give the very same
        self._handles: list[Any] = []
        for name, module in net.named_modules():
            before = partial(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(partial(self._after, name)))
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                added = lambda parameter, name=name: self._passes.add((self.calls[""], name))  # noqa: E731
                self._handles.append(parameter.register_post_accumulate_grad_hook(added))
                came = lambda gradient, name=name: self.tensors.update([name])  # noqa: E731
                self._handles.append(parameter.register_hook(came))

    @property
    def parameters(self) -> Counter[str]:
        return Counter(name for _, name in self._passes)

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(_nodes(tensor for _, tensor in leaves((args, kwargs), (Tensor,))))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        inputs = self._running.pop()
        if torch._C._current_graph_task_id() == -1:
            self.calls[name] += 1
        tensors = [tensor for _, tensor in leaves(output, (Tensor,)) if tensor.requires_grad]
        goes_on = not inputs or _reach(_nodes(tensors), inputs)
        came: list[str] = []

        def arrived(gradient: Tensor) -> None:
            if not came:
                came.append(name)
                self.outputs[name] += 1
                self.inputs[name] += goes_on

        for tensor in tensors:
            if torch._C._current_graph_task_id() != -1 and any(
                tensor is one and name == other for other, one in self._tapped
            ):
                continue
            if tensor.is_leaf:
                self._tapped.append((name, tensor))
            self._handles.append(tensor.register_hook(arrived))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _nodes(tensors: Iterable[Tensor]) -> list[Any]:
    if not torch.is_grad_enabled():
        return []
    return [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]


def _reach(nodes: list[Any], goals: list[Any]) -> bool:
    """Whether the graph leads from some of the nodes to some goal."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in goals:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


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
    expected = {"backward_pre": reference.outputs, "backward": reference.inputs}.get(kind, reference.calls)
    assert _fired(handle) == +expected


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
