"""SEMANTICS.md D: what is kept (26), what dies (27), and copies and files of a hooked model (21, 22, 23)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.nets import Boom, Failing, Nested, mlp

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


# ---- 21, 22: copies ----


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
def test_a_copy_is_inert(kind: str) -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        handle = getattr(hooks, kind)("0", lambda *arguments: None)
        clone = copy.deepcopy(net)
        clone(_x()).sum().backward()
        assert handle.fired == 0
        net(_x()).sum().backward()
        assert handle.fired == 1
    clone(_x()).sum().backward()
    assert handle.fired == 1


def test_a_copy_of_a_recorded_model_is_not_recorded() -> None:
    net = mlp()
    with th.record(net, kinds=ALL) as rec:
        clone = copy.deepcopy(net)
        clone(_x()).sum().backward()
        assert rec.order() == []
        net(_x()).sum().backward()
        assert [call.path for call in rec.order() if call.phase == "forward"] == ["", "0", "1", "2"]


def test_a_callable_object_with_state_is_not_copied_along() -> None:
    class Store:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            self.calls += 1

        def __deepcopy__(self, memo: Any) -> Store:
            raise AssertionError("the callback was copied")

    net, store = mlp(), Store()
    with th.hooks(net) as hooks:
        hooks.forward("**", store)
        copy.deepcopy(net)(_x())
        assert store.calls == 0
        net(_x())
        assert store.calls == 4


@pytest.mark.parametrize("make", [mlp, Nested, lambda: nn.LSTM(4, 2)], ids=["in-place", "dataclass", "lstm"])
def test_deepcopy_works_during_and_after_capture(make: Callable[[], nn.Module]) -> None:
    net = make()
    keywords = {"scale": torch.ones(4, requires_grad=True)} if isinstance(net, Nested) else {}

    def leaf_sum(out: Any) -> Tensor:
        return out.logits.sum() if hasattr(out, "logits") else (out[0] if isinstance(out, tuple) else out).sum()

    with th.record(net, kinds=ALL, tensors=True), th.hooks(net) as hooks:
        for kind in KINDS:
            getattr(hooks, kind)("**", lambda *arguments: None)
        copies = [copy.deepcopy(net)]
        out = net(_x(), **keywords)
        copies.append(copy.deepcopy(net))
        leaf_sum(out).backward()
        copies.append(copy.deepcopy(net))
    copies.append(copy.deepcopy(net))
    for clone in copies:
        assert torch.equal(leaf_sum(clone(_x(), **keywords)), leaf_sum(out))


# ---- 23: files ----


@pytest.mark.parametrize("dump", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_a_hooked_model_can_be_saved(dump: Callable[..., None]) -> None:
    net, file = mlp(), io.BytesIO()
    seen: list[int] = []
    with th.record(net, kinds=ALL), th.hooks(net) as hooks:
        for kind in KINDS:
            getattr(hooks, kind)("**", lambda *arguments: seen.append(1))
        net(_x()).sum().backward()
        seen.clear()
        dump(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False) if dump is torch.save else pickle.load(file)
    loaded(_x()).sum().backward()
    assert seen == []
    assert torch.equal(loaded(_x()), net(_x()))


def test_a_saved_model_loads_where_tenterhook_is_not(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    with th.record(net), th.hooks(net) as hooks:
        hooks.forward("**", lambda *arguments: None, always_call=True)
        hooks.forward_pre("**", lambda *arguments: None)
        torch.save(net, tmp_path / "net.pt")
    program = (
        "import sys, torch; sys.modules['tenterhook'] = None;"
        f"net = torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False); print(net(torch.ones(1, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("torch.Size([1, 2])\n", 0), done.stderr


def test_state_dict_and_its_file_are_as_without_hooks() -> None:
    net = mlp()
    plain = net.state_dict()
    with th.record(net, kinds=ALL), th.hooks(net) as hooks:
        hooks.param_grad("**", lambda *arguments: None)
        net(_x()).sum().backward()
        hooked = net.state_dict()
        file = io.BytesIO()
        torch.save(hooked, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(plain) == list(hooked) == list(loaded)
    assert all(torch.equal(plain[key], loaded[key]) for key in plain)
