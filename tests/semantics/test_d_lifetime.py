"""SEMANTICS.md D: what is kept (26) and what dies (27)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.nets import Boom, Failing, mlp

ALL = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
KINDS = ("forward_pre", "forward", "backward_pre", "backward", "param_grad")


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---- 26: an output that is kept keeps no graph, and a slice keeps no whole ----


class _Witness(torch.autograd.Function):
    """Leaves a weak reference to a node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _graph_nodes_after(run: Callable[[nn.Module, Tensor], None]) -> int:
    """Count the graphs that live after five forwards whose outputs the caller has dropped."""
    born: list[weakref.ref[Any]] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out = _Witness.apply(self.body(x))
            born.append(weakref.ref(out.grad_fn))
            return out

    net = Net()
    for _ in range(5):
        run(net, torch.ones(2, 4))
    assert len(born) == 5
    return sum(node() is not None for node in born)


def test_kept_tensors_keep_no_graph() -> None:
    with_graph: list[Tensor] = []
    assert _graph_nodes_after(lambda net, x: with_graph.append(net(x))) == 5  # what this test can see

    recorders = []

    def record(net: nn.Module, x: Tensor) -> None:
        with th.record(net, kinds=ALL, tensors=True) as rec:
            net(x)
        recorders.append(rec)

    assert _graph_nodes_after(record) == 0
    assert all(rec[""].output.shape == (2, 2) for rec in recorders)


def test_hooks_keep_no_graph_after_the_output_is_gone() -> None:
    def run(net: nn.Module, x: Tensor) -> None:
        with th.hooks(net) as hooks:
            for kind in KINDS:
                getattr(hooks, kind)("**", lambda *arguments: None)
            net(x).sum().backward()

    assert _graph_nodes_after(run) == 0


def test_a_session_that_goes_on_keeps_no_graph() -> None:
    net = mlp()
    with th.record(net, kinds=ALL, tensors=True) as rec, th.hooks(net) as hooks:
        hooks.backward("**", lambda *arguments: None)
        nodes = []
        for _ in range(5):
            x = _Witness.apply(torch.ones(2, 4, requires_grad=True))
            nodes.append(weakref.ref(x.grad_fn))
            net(x).sum().backward()
        del x
        assert [node() for node in nodes] == [None] * 5
        assert len(rec[""].calls) == 5


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:1], lambda t: t[:, :1], lambda t: t.expand(3, -1, -1), lambda t: t.t(), lambda t: t.narrow(0, 2, 3)],
    ids=["row", "column", "expanded", "transposed", "narrowed"],
)
def test_a_stored_slice_holds_its_own_bytes_only(view: Callable[[Tensor], Tensor]) -> None:
    class Slice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return view(x)

    net = nn.Sequential(Slice())
    with th.record(net, "0", kinds=["output"], tensors=True) as rec:
        out = net(torch.randn(1000, 100))
    kept = rec["0"].output
    assert torch.equal(kept, out)
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.itemsize


# ---- 27: with the collector off, a model dies at del ----


class Watched(nn.Module):
    """A model with a hook of its own, as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.seen = 0

    def on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _x() -> Tensor:
    return torch.ones(2, 4, requires_grad=True)


def _all_hooks(net: Watched) -> Any:
    hooks = th.hooks(net)
    for kind in KINDS:
        getattr(hooks, kind)("**", lambda *arguments: None)
    return hooks


def _finished_hooks(net: Watched) -> Any:
    with _all_hooks(net) as hooks:
        net(_x()).sum().backward()
    return hooks


def _unfinished_hooks(net: Watched) -> Any:
    hooks = _all_hooks(net)
    net(_x()).sum().backward()
    return hooks


def _never_called(net: Watched) -> Any:
    return _all_hooks(net)


def _single_handles(net: Watched) -> Any:
    hooks = th.hooks(net)
    return [hooks.forward("body.0", lambda *arguments: None), hooks.backward("body", lambda *arguments: None)]


def _own_method(net: Watched) -> Any:
    hooks = th.hooks(net)
    hooks.forward("**", net.on_output)
    net(_x())
    assert net.seen == 5
    return hooks


def _finished_record(net: Watched) -> Any:
    with th.record(net, kinds=ALL, tensors=True) as rec:
        net(_x()).sum().backward()
    return rec


def _unfinished_record(net: Watched) -> Any:
    rec = th.record(net, kinds=["input", "output", "grad_input", "grad_output", "param_grad"]).start()
    net(_x()).sum().backward()
    rec.order()
    return rec


def _record_and_output(net: Watched) -> Any:
    with th.record(net, kinds=ALL) as rec:
        out = net(_x())
    return rec, out


def _hooks_and_output(net: Watched) -> Any:
    with _all_hooks(net) as hooks:
        out = net(_x())
    return hooks, out


def _unfinished_record_and_output(net: Watched) -> Any:
    rec = th.record(net).start()
    return rec, net(_x())


def _exception_in_callback(net: Watched) -> Any:
    def fail(*arguments: Any) -> None:
        raise Boom

    hooks = _all_hooks(net)
    hooks.forward("body.2", fail)
    try:
        net(_x())
    except Boom:
        pass
    return hooks


def _exception_in_model(net: Watched) -> Any:
    net.body.append(Failing())
    hooks = _all_hooks(net)
    try:
        with th.record(net, kinds=ALL) as rec:
            net(_x())
    except Boom:
        pass
    return rec, hooks


def _interrupt(net: Watched) -> Any:
    net.body.append(Failing(KeyboardInterrupt()))
    hooks = _all_hooks(net)
    try:
        with th.record(net, kinds=ALL) as rec:
            net(_x())
    except KeyboardInterrupt:
        pass
    hooks.close()
    return rec


def _failing_backward(net: Watched) -> Any:
    hooks = _all_hooks(net)
    with th.record(net, kinds=ALL) as rec:
        out = net(_x())
        out.register_hook(_fail)
        try:
            out.sum().backward()
        except Boom:
            pass
    return rec, hooks


def _fail(gradient: Tensor) -> None:
    raise Boom


@pytest.mark.parametrize(
    "use",
    [
        _finished_hooks, _unfinished_hooks, _never_called, _single_handles, _own_method, _finished_record, _unfinished_record,
        _record_and_output, _hooks_and_output, _unfinished_record_and_output, _exception_in_callback, _exception_in_model,
        _interrupt, _failing_backward,
    ],
)  # fmt: skip
def test_a_hooked_model_dies_at_del(use: Callable[[Watched], Any]) -> None:
    net = Watched()
    parts = [weakref.ref(module) for module in net.modules()]
    kept = use(net)
    del net
    assert [part() for part in parts] == [None] * len(parts)
    _close(kept)


def _close(kept: Any) -> None:
    for one in kept if isinstance(kept, (tuple, list)) else [kept]:
        if not isinstance(one, Tensor):
            (one.close if hasattr(one, "close") else one.remove)()


def test_a_backward_hook_that_is_on_keeps_its_module_for_the_graph_alone() -> None:
    # as the framework's own do: somebody may yet call backward, and the callback is owed its module
    net = Watched()
    alive = weakref.ref(net)
    hooks = th.hooks(net)
    seen: list[str] = []
    hooks.backward("(root)", lambda module, grad_input, grad_output: seen.append(type(module).__name__))
    out = net(_x())
    del net
    out.sum().backward()
    assert seen == ["Watched"]
    del out
    assert alive() is None
    hooks.close()


def test_a_finished_recording_goes_with_its_last_reference() -> None:
    net = mlp()
    with th.record(net, kinds=ALL, tensors=True) as rec:
        net(_x()).sum().backward()
    rec.order()
    alive = weakref.ref(rec)
    del rec
    assert alive() is None


def test_a_set_of_hooks_for_a_model_that_is_gone_says_so() -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda *arguments: None)
        del net
        with pytest.raises(th.TenterhookError, match="gone"):
            hooks.forward("0", lambda *arguments: None)
