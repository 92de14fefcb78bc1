"""The native path writes the rows that the Python code writes, and gives way where it has to."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import tenterhook as th
from benchmarks.models import build as build_benchmark
from tenterhook.backends.torch import BACKEND
from tenterhook.calls import Watched
from tenterhook.capture import Capture
from tenterhook.inventory import watch_model
from tenterhook.native import NATIVE
from tenterhook.recording.memory import MemorySink
from tenterhook.request import capture_options, check_kinds
from tests.five_models import MODELS, train
from tests.properties.test_nothing_changed import EXAMPLES
from tests.properties.trees import WIDTH, Boom, Spec, build, specs, unwrap

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="the native path is not built, or TENTERHOOK_CALLS=python"),
    pytest.mark.filterwarnings(
        "ignore:None of the inputs have requires_grad=True:UserWarning", "ignore:torch.utils.checkpoint:UserWarning"
    ),
]

Rows = tuple[list[dict[str, Any]], list[dict[str, Any]], str]


def _rows(rec: th.Recorder) -> Rows:
    calls = rec.table("calls").drop_columns(["start_ns", "duration_ns"]).to_pylist()
    return calls, [{k: repr(v) for k, v in row.items()} for row in rec.table("values").to_pylist()], str(rec.coverage)


def _native_calls(rec: th.Recorder) -> int:
    return rec._capture._engine.calls_recorded if rec._capture._engine is not None else 0


def _both(make: Callable[[], nn.Module], work: Callable[[nn.Module], Any], **options: Any) -> tuple[Rows, Rows, int]:
    torch.manual_seed(0)
    net = make()
    with th.record(net, **options) as rec:
        work(net)
    native, count = _rows(rec), _native_calls(rec)
    torch.manual_seed(0)
    net = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
        with th.record(net, **options) as rec:
            work(net)
    assert _native_calls(rec) == 0
    return native, _rows(rec), count


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "order and shapes": {"stats": None, "kinds": ["output"]},
    "inputs, tensors": {"tensors": True},
    "input gradients": {"kinds": ["grad_input", "grad_output", "output"]},
    "every second step": {"every": 2},
    "no sketch": {"sketch": False},
    "recomputations": {"recompute": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_five_models_give_the_same_rows(name: str, options: str) -> None:
    make, shape = MODELS[name]
    native, python, count = _both(make, lambda net: train(net, shape), **OPTIONS[options])
    assert native == python
    assert count > 0 or "grad_input" in OPTIONS[options].get("kinds", ())


@pytest.mark.parametrize("name", ["tiny401", "transformer"])
def test_benchmark_models_give_the_same_rows(name: str) -> None:
    net, x = build_benchmark(name)

    def work(net: nn.Module) -> None:
        torch.manual_seed(3)
        net(x).square().mean().backward()
        with torch.no_grad():
            net(x)

    native, python, count = _both(lambda: copy.deepcopy(net), work)
    assert native == python
    assert count > len(native[0]) / 2  # the native path is what records


@EXAMPLES
@given(spec=specs())
def test_any_tree_gives_the_same_rows(spec: Spec) -> None:
    def work(net: nn.Module) -> None:
        for step in range(2):
            x = torch.randn(3, WIDTH, requires_grad=step == 0)
            try:
                out = unwrap(net(x, scale=torch.full((), 0.5)))
                if out.requires_grad:
                    out.square().sum().backward()
            except Boom:
                continue

    native, python, _ = _both(lambda: build(spec), work)
    assert native == python


class _Gives(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = _Function(give)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.last(x)


class _Function(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: Tensor) -> Any:
        return self.give(x)


def _zeros_without_memory() -> Tensor:
    return torch._efficientzerotensor((3, 4))  # pyright: ignore[reportPrivateImportUsage]


UNUSUAL: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda x: x.t() * 1,
    "not contiguous": lambda x: (x * 2)[:, ::2],
    "expanded": lambda x: (x * 2)[:1].expand(5, 4),
    "no dimensions": lambda x: x.sum(),
    "empty": lambda x: x[:0] * 1,
    "complex": lambda x: torch.complex(x, x).conj(),
    "negated view": lambda x: torch.complex(x, x).conj().imag,
    "bool": lambda x: x > 0,
    "long": lambda x: x.long(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "NaN and infinities": lambda x: x / 0,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x.detach(), x.detach()[:1]]),
    "quantised": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
    "parameter": lambda x: nn.Parameter(x.detach()),
    "the input itself": lambda x: x,
    "view": lambda x: x.view(-1),
    "None": lambda x: None,
    "tuple": lambda x: (x * 2, None, [x * 3]),
    "large": lambda x: x.repeat(500, 10),
    "large, transposed": lambda x: x.repeat(500, 10).t() + 0,
    "many dimensions": lambda x: x.reshape(3, 4, *[1] * 20) * 2,
    "vmap": torch.func.vmap(torch.sin),
    "zeros without memory": lambda x: _zeros_without_memory(),
    "a part of zeros without memory": lambda x: _zeros_without_memory()[1:],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("name", UNUSUAL)
def test_outputs_of_any_kind_give_the_same_rows(name: str) -> None:
    def work(net: nn.Module) -> None:
        for x in (torch.arange(12.0).reshape(3, 4), torch.ones(3, 4, requires_grad=True)):
            net(x).sum().backward()

    native, python, _ = _both(lambda: _Gives(UNUSUAL[name]), work)
    assert native == python


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Tanh())


def _order(rec: th.Recorder) -> list[tuple[str, str]]:
    return [(call.path, call.phase) for call in rec.order()]


PATHS = ["", "0", "1", "1.0", "1.1", "2"]


# ---- what stands around a module's calls ----


def _attributes(net: nn.Module) -> list[list[str]]:
    return [list(vars(module)) for module in net.modules()]


def test_nothing_stays_on_the_modules() -> None:
    net = _net()
    before = _attributes(net)
    with th.record(net):
        net(torch.ones(2, 4))
        assert _attributes(net) != before
    assert _attributes(net) == before


def test_copies_and_pickles_are_inert() -> None:
    net = _net()
    before = _attributes(net)
    with th.record(net) as rec:
        net(torch.ones(2, 4))
        copies = [copy.deepcopy(net), copy.copy(net), pickle.loads(pickle.dumps(net))]
        rows = rec.table("calls").num_rows
        for one in (copies[0], copies[2]):
            assert _attributes(one) == before
            assert torch.equal(one(torch.ones(2, 4)), net(torch.ones(2, 4)))
        assert rec.table("calls").num_rows == 3 * rows  # those of the net alone
    assert pickle.loads(pickle.dumps(net.state_dict())).keys() == net.state_dict().keys()


def test_a_copy_of_a_modules_attributes_is_not_taken_for_it() -> None:
    net = _net()
    x = torch.ones(2, 4)
    with th.record(net) as rec:
        replica = net[0]._replicate_for_data_parallel()
        replica.weight = net[0].weight * 0 + 1
        replica.bias = net[0].bias * 0
        assert torch.equal(replica(x), torch.full((2, 4), 4.0))
        assert not torch.equal(net[0](x), replica(x))
    assert [call.path for call in rec.order()] == ["0", "0", "0"]  # a replica goes by the name of its module


@pytest.fixture(scope="module")
def loaded_compiler() -> None:
    """The compiler changes ``nn.Module`` when it is first used, for good."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))


@pytest.mark.usefixtures("loaded_compiler")
def test_compiling_in_the_session_is_seen_at_the_next_step() -> None:
    net, x = _net(), torch.ones(2, 4)
    with th.record(net) as rec:
        net(x)
        net[1].compile(backend="eager")
        net(x)
        net.compile(backend="eager")
        net(x)
        net(x)
    steps = [[call.path for call in rec.order() if call.step == step] for step in range(3)]
    assert steps == [PATHS, PATHS + PATHS[1:], PATHS]  # the call that finds it out lacks the root
    assert net[1]._compiled_call_impl is not None and net._compiled_call_impl is not None


class _OwnCall(nn.Linear):
    def __getattribute__(self, name: str) -> Any:
        if name == "_call_impl":
            return lambda x: self.forward(x) * 3
        return super().__getattribute__(name)


def test_a_call_impl_that_only_the_instance_knows_is_called() -> None:
    net, x = nn.Sequential(_OwnCall(4, 4), nn.Tanh()), torch.ones(2, 4)
    clean = net(x)
    with th.record(net) as rec:
        assert all(torch.equal(net(x), clean) for _ in range(3))
    assert "never called" in str(rec.coverage)  # by what its hooks would run in


class _Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[nn.Module]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(BACKEND.running_modules())
        return x


def test_what_others_put_in_the_place_of_torchs_call_hides_no_running_call() -> None:
    asks = _Asks()
    net, x = nn.Sequential(asks), torch.ones(2, 4)
    with th.record(net), pytest.MonkeyPatch.context() as patch:
        net(x)
        net(x)
        for name in ("__call__", "_call_impl", "_wrapped_call_impl"):
            own = getattr(nn.Module, name)
            patch.setattr(nn.Module, name, lambda module, *args, own=own: own(module, *args))
            net(x)
    assert asks.found == [[asks, net]] * 5


def test_a_hook_put_on_in_the_session_runs_after_ours() -> None:
    net, x = _net(), torch.ones(2, 4)
    with th.record(net, tensors=True) as rec:
        clean = net(x)
        handle = net[1].register_forward_hook(lambda module, args, output: output * 0)
        pre = net[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net(x)
        handle.remove()
        pre.remove()
        assert torch.equal(net(x), clean)
    assert _order(rec) == [(path, "forward") for path in PATHS] * 3
    second = {call.path: call for call in rec.order() if call.step == 1}
    assert second["1"].output.any()  # ours came first
    assert not second["2"].input["input"].any()


def test_hooks_of_others_see_what_they_saw() -> None:
    net, x = _net(), torch.ones(2, 4, requires_grad=True)
    seen: list[str] = []
    with th.record(net) as rec:
        net(x)
        net[1].register_full_backward_hook(lambda *arguments: seen.append("backward"))
        net[0].register_forward_hook(lambda *arguments: seen.append("forward"))
        net(x).sum().backward()
    assert seen == ["forward", "backward"]
    assert _order(rec)[6:12] == [(path, "forward") for path in PATHS]


def test_a_hook_on_every_module_is_no_hindrance() -> None:
    net, x, seen = _net(), torch.ones(2, 4), []
    with th.record(net) as rec:
        net(x)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
        net(x)
        handle.remove()
        net(x)
    assert len(seen) == 6
    assert _order(rec) == [(path, "forward") for path in PATHS] * 3


def test_an_edit_begun_later_is_seen() -> None:
    net, x = _net(), torch.ones(2, 4)
    with th.record(net, tensors=True) as rec:
        net(x)
        with th.edit(net) as edit:
            edit.output("1.1", th.edits.zero())
            net(x)
        net(x)
    one, two, three = (next(c.output for c in rec.order() if c.step == step and c.path == "1.1") for step in range(3))
    assert one.any() and not two.any() and torch.equal(one, three)


def test_two_recordings_see_the_same() -> None:
    net, x = _net(), torch.ones(2, 4)
    with th.record(net) as outer:
        net(x)
        with th.record(net) as inner:
            net(x).sum().backward()
        net(x)
    assert _order(inner)[:6] == [(path, "forward") for path in PATHS]
    assert len(_order(outer)) == len(_order(inner)) + 12


def test_installed_hooks_lists_ours() -> None:
    net = _net()
    with th.record(net):
        listed = [(one.path, one.kind, one.owner) for one in th.installed_hooks(net) if one.path == "1.1"]
    assert listed == [("1.1", "forward_pre", "tenterhook"), ("1.1", "forward", "tenterhook")]
    assert not [one for one in th.installed_hooks(net) if one.path]


class _Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = _Function(self._fail)
        self.error: BaseException | None = error

    def _fail(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("stop"), SystemExit(3)])
def test_what_raises_is_recorded_and_the_next_call_is_clean(error: BaseException) -> None:
    def work(net: nn.Module) -> None:
        assert isinstance(net, _Fails)
        with pytest.raises(type(error)) as raised:
            net(torch.ones(2))
        assert raised.value is error
        net.error = None
        net(torch.ones(2))

    native, python, _ = _both(lambda: _Fails(error), work)
    assert native == python


def test_an_error_that_is_caught_inside_leaves_the_order_right() -> None:
    class Catches(_Fails):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except ValueError:
                return x

    native, python, _ = _both(
        lambda: nn.Sequential(Catches(ValueError("mine")), nn.ReLU()), lambda net: net(torch.ones(2))
    )
    assert native == python


def test_a_model_dies_at_del_without_the_collector() -> None:
    net = _net()
    dead = weakref.ref(net)
    gc.disable()
    try:
        with th.record(net):
            net(torch.ones(2, 4)).sum().backward()
            del net
            assert dead() is None
    finally:
        gc.enable()


def test_a_capture_that_is_closed_is_in_no_cycle() -> None:
    net = _net()
    kinds = check_kinds(None, tensors=False)
    options = capture_options(kinds, stats="basic", sketch=True, recompute=False, on_error="raise", to_disk=False)
    gc.collect()
    gc.disable()
    try:
        capture = Capture(BACKEND, MemorySink(), options, lambda: None, lambda step: None)
        capture.watched = watch_model(BACKEND, net, "Net", None, False)
        for watched in capture.watched:
            capture.attach(watched)
        net(torch.ones(2, 4)).sum().backward()
        assert capture.rows_recorded == 24
        capture.close()
        dead = weakref.ref(capture)
        del capture
        assert dead() is None
    finally:
        gc.enable()


def test_closing_in_the_middle_of_a_call() -> None:
    class Closes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rec.close()
            return x * 2

    net = nn.Sequential(nn.ReLU(), Closes(), nn.ReLU())
    before = _attributes(net)
    rec = th.record(net).start()
    net(torch.ones(2))
    assert _attributes(net) == before
    net(torch.ones(2))
    assert {call.step for call in rec.order()} == {0}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("what", ["single", "own", "session", "pause", "pause and hook"])
def test_what_is_put_on_a_module_that_is_running_loses_nothing_of_its_call(what: str, raises: bool) -> None:
    class Puts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if what == "single":
                for module in (net[0], self):
                    stack.enter_context(th.register_forward_hook(module, lambda *_: None))
            elif what == "own":
                net[0].register_forward_hook(lambda *_: None)
            elif what == "session":
                stack.enter_context(th.hooks(net)).forward("**", lambda *_: None)
            else:
                recorders[0].pause()
                if "hook" in what:
                    net[0].register_forward_hook(lambda *_: None)
                recorders[0].resume()
            if raises:
                raise Boom
            return x * 2

    def work(net: nn.Module) -> Rows:
        with stack, th.record(net) as rec:
            recorders[:] = [rec]
            for _ in range(2):
                with contextlib.suppress(Boom):
                    net(torch.ones(2, requires_grad=True)).sum().backward()
        return _rows(rec)

    recorders: list[th.Recorder] = []
    stack = contextlib.ExitStack()
    net = nn.Sequential(nn.Sequential(Puts(), nn.ReLU()), nn.ReLU())
    native = work(net)
    net = nn.Sequential(nn.Sequential(Puts(), nn.ReLU()), nn.ReLU())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
        assert work(net) == native
    assert not any(row["error"] == "did not end" for row in native[0])


class _View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2)[:]


def test_closing_from_another_thread_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    describe, moments, last = Watched.site, 0, 0
    recorders: list[th.Recorder] = []

    def site(watched: Watched, kind: str = "", slot: str = "") -> Any:
        nonlocal moments
        found = describe(watched, kind, slot)
        moments += 1
        if moments == last and recorders:
            closing = threading.Thread(target=recorders[0].close)
            closing.start()
            closing.join()
        return found

    monkeypatch.setattr(Watched, "site", site)
    net = nn.Sequential(_View(), nn.Sequential(_View(), nn.ReLU()), _View())
    while moments >= last:  # until it has been closed at each of them
        moments, last, x = 0, last + 1, torch.ones(3, requires_grad=True)
        with th.record(net, tensors="2", on_error="raise") as rec:
            recorders[:] = [rec]
            output = net(x)
            rec.table("calls")  # handed over, so that modules are described again
            output.sum().backward()
        recorders.clear()
        assert output.tolist() == x.grad.tolist() == [8.0] * 3
    assert last > 20


class _Recurs(nn.Module):
    """Calls itself, with something done before it does."""

    def __init__(self, between: Callable[[nn.Module], Any], error: Exception | None = None) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.between = between
        self.error = error
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        try:
            if self.depth == 1:
                self.between(self)
                x = self(x) * 2
                if self.error is not None:
                    raise self.error
            return self.last(x)
        finally:
            self.depth -= 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("error", [None, ValueError("mine")])
def test_calls_that_run_while_hooks_take_the_place_of_ours_end_as_all_do(error: Exception | None) -> None:
    def another_recording(module: nn.Module) -> None:
        with th.record(module):
            pass

    betweens: list[Callable[[nn.Module], Any]] = [
        lambda module: module.register_forward_hook(lambda *arguments: None),
        lambda module: torch.jit.trace(module.last, torch.ones(2, 4)),
        another_recording,
    ]

    def work(net: nn.Module) -> None:
        for _ in range(2):
            try:
                net(torch.ones(2, 4)).sum().backward()
            except ValueError as caught:
                assert caught is error

    for between in betweens:
        native, python, _ = _both(lambda between=between: nn.Sequential(_Recurs(between, error)), work)
        assert native == python
        assert not [row for row in native[0] if row["error"] == "did not end"]


def test_rows_are_right_where_a_block_is_handed_over_while_a_row_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Watched.site

    def site(self: Watched, kind: str = "", slot: str = "") -> Any:
        if recs:
            recs[-1]._capture.rows.flush()  # as another thread may
        return plain(self, kind, slot)

    recs: list[th.Recorder] = []

    def rows() -> Rows:
        torch.manual_seed(0)
        net = _net()
        with th.record(net) as rec:
            recs.append(rec)
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
            recs.clear()
        return _rows(rec)

    clean = rows()
    monkeypatch.setattr(Watched, "site", site)
    assert rows() == clean


@pytest.mark.parametrize("rows", range(1, 7))
def test_a_session_that_ends_while_a_block_is_handed_over(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("tenterhook.row_capture._BLOCK_ROWS", rows)
    plain = MemorySink.write_values
    recs: list[th.Recorder] = []

    def write_values(self: MemorySink, batch: Any) -> None:
        plain(self, batch)
        if recs:
            recs.pop().close()

    monkeypatch.setattr(MemorySink, "write_values", write_values)
    gives: list[Callable[[Tensor], Any]] = [lambda x: x * 2, lambda x: x.view(-1), lambda x: (x, x), Tensor.detach]
    for give in gives:
        net, x = _Gives(give), torch.ones(3, 4, requires_grad=True)
        clean = net(x)
        rec = th.record(net, on_error="raise").start()
        recs.append(rec)
        for _ in range(4):
            assert torch.equal(net(x), clean)
            net(x).sum().backward()
        assert not recs
        rec.close()


def test_functional_calls_are_the_models_not_those_of_another_recording() -> None:
    def rows(net: nn.Module, native: bool) -> list[dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
            with th.record(net, ops=True) as rec, th.record(net, kinds=["output"]):
                net(torch.ones(3, 4))
        return rec.table("calls").drop_columns(["start_ns", "duration_ns"]).to_pylist()

    for name in ("vmap", "sparse", "complex", "no dimensions"):
        net = _Gives(UNUSUAL[name])
        with th.record(net, ops=True) as rec:
            net(torch.ones(3, 4))
        alone = [call.path for call in rec.order()]
        native = rows(net, True)
        assert native == rows(net, False)
        assert sorted(row["path"] for row in native) == sorted(alone)


def test_pauses_and_sampled_steps() -> None:
    def work(net: nn.Module) -> None:
        for _ in range(7):
            with torch.no_grad():
                net(torch.ones(2, 4))

    native, python, count = _both(_net, work, every=3)
    assert native == python
    assert count > 0
    assert sorted({row["step"] for row in native[0]}) == [0, 3, 6]


def test_threads_write_their_own_rows() -> None:
    net = _net()
    with th.record(net) as rec:

        def work() -> None:
            for _ in range(20):
                net(torch.ones(2, 4)).sum().backward()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for one in threads:
            one.start()
        work()
        for one in threads:
            one.join()
    calls = rec.table("calls").to_pylist()
    forward = [row for row in calls if row["phase"] == "forward"]
    assert len(forward) == 4 * 20 * 6
    assert len({row["seq"] for row in calls}) == len(calls)
    assert rec.table("values").num_rows == 2 * 4 * 20 * 6
    for thread in {row["thread"] for row in calls}:
        last = [row["call"] for row in forward if row["thread"] == thread and row["path"] == "2"]
        assert len(last) == 20


def test_blocks_are_handed_over_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenterhook.row_capture._BLOCK_ROWS", 5)

    def work(net: nn.Module) -> None:
        for _ in range(4):
            net(torch.ones(2, 4)).sum().backward()

    native, python, count = _both(_net, work)
    assert native == python
    assert count > 20


def test_blocks_are_handed_over_while_a_module_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the thread that writes to the disk does, where it gets its turn then.
    describe = Watched.site
    handed: set[tuple[str, str]] = set()
    recorders: list[th.Recorder] = []

    def site(watched: Watched, kind: str = "", slot: str = "") -> Any:
        found = describe(watched, kind, slot)
        if recorders and (watched.path, kind) not in handed:
            handed.add((watched.path, kind))
            recorders[0].table("calls")
        return found

    def work(net: nn.Module) -> Rows:
        with th.record(net) as rec:
            recorders[:] = [rec]
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
        recorders.clear()
        return _rows(rec)

    torch.manual_seed(0)
    expected = work(_net())
    monkeypatch.setattr(Watched, "site", site)
    handed.clear()
    torch.manual_seed(0)
    assert work(_net()) == expected
    assert len(handed) > 6


# ---- torch's own ways of looking at a module ----


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_and_exporting_in_a_session() -> None:
    net, x = _net().eval(), torch.ones(2, 4)
    clean = net(x)
    with th.record(net):
        net(x)
        traced = torch.jit.trace(net, x)
        graph = torch.fx.symbolic_trace(net)
        exported = torch.export.export(net, (x,))
    for one in (traced, graph, exported.module()):
        assert torch.equal(one(x), clean)


def test_the_python_form_alone_gives_the_same_rows() -> None:
    program = (
        "import torch, tenterhook as th\n"
        "from tests.five_models import MODELS, train\n"
        "make, shape = MODELS['transformer']\n"
        "torch.manual_seed(0)\n"
        "net = make()\n"
        "with th.record(net) as rec: train(net, shape)\n"
        "calls = rec.table('calls').drop_columns(['start_ns', 'duration_ns'])\n"
        "print(hash(str((calls.to_pylist(), rec.table('values').to_pylist()))))\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TENTERHOOK_CALLS": form, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for form in ("native", "python")
    ]
    assert printed[0] == printed[1]
