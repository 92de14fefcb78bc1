"""Around the native path all is as it was: attributes, copies, compilers, hooks of others, other sessions, lifetimes."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.backends.torch import BACKEND
from tenterhook.capture import Capture
from tenterhook.inventory import watch_model
from tenterhook.recording.memory import MemorySink
from tenterhook.request import capture_options, check_kinds
from tests.native_rows import NATIVE_ONLY, _attributes, _net

pytestmark = NATIVE_ONLY


def _order(rec: th.Recorder) -> list[tuple[str, str]]:
    return [(call.path, call.phase) for call in rec.order()]


PATHS = ["", "0", "1", "1.0", "1.1", "2"]


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
def test_compiling_in_the_session_is_seen_at_the_next_call() -> None:
    net, x = _net(), torch.ones(2, 4)
    with th.record(net) as rec:
        net(x)
        net[1].compile(backend="eager")
        net(x)
        net.compile(backend="eager")
        net(x)
        net(x)
    steps = [[call.path for call in rec.order() if call.step == step] for step in range(4)]
    assert steps == [PATHS] * 4
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


class _Triples(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 3


class _Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _Within(nn.Linear):
    def _call_impl(self, x: Tensor) -> Tensor:
        return super()._call_impl(x) * 5


@pytest.mark.parametrize("become", [_OwnCall, _Triples, _Doubles, _Within])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_module_whose_class_changes_runs_as_its_new_class_has_it(
    become: type[nn.Module], at: int, every: int
) -> None:
    """Between two samples, between two calls and in the middle of the call of the model."""

    class Becomes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if counts[0] == at:
                net[1].__class__ = become
            counts[0] += 1
            return x

    def run(record: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net[:] = [Becomes(), nn.Linear(4, 4), nn.Tanh()]
        counts[0] = 0
        model = nn.Sequential(*net)
        with th.record(model, every=every) if record else contextlib.nullcontext():
            given = [model(torch.ones(2, 4)) for _ in range(4)]
            net[1].__class__ = become if at == 4 else type(net[1])
            return given + [model(torch.ones(2, 4)) for _ in range(4)]

    net: list[nn.Module] = []
    counts = [0]
    assert all(map(torch.equal, run(True), run(False)))


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
