"""Section F, rows 48, 50, 53: lazy modules, state dicts and sharded parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.semantics.asking import ignore, make_net
from tests.semantics.wrapping import IDS, WRAPPERS

pytestmark = pytest.mark.usefixtures("loaded_compiler")


# ---- row 48: lazy modules ----


def make_lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(1))


@pytest.mark.parametrize("selection", ["type:Linear", nn.Linear, "type:LazyLinear", "[02]"])
def test_a_lazy_module_is_selected_by_what_it_becomes(selection: Any) -> None:
    """Row 48: before and after materialisation, and by both of its types before."""
    model = make_lazy()
    with th.hooks(model) as hooks:
        handle = hooks.forward(selection, ignore)
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
    assert handle.paths == ["0", "2"] and handle.fired == 4
    if selection != "type:LazyLinear":
        with th.hooks(model) as hooks:
            assert hooks.forward(selection, ignore).paths == ["0", "2"]


def test_parameter_hooks_wait_for_the_first_call() -> None:
    """Row 48: torch raises for a hook on a parameter without a shape; the module's own hook is left alone."""
    model = make_lazy()
    own: Any = [dict(module._forward_pre_hooks) for module in model]
    seen: list[str] = []
    with th.hooks(model) as hooks:
        handle = hooks.param_grad("**", lambda name, grad: seen.append(f"{name} {tuple(grad.shape)}"))
        assert handle.live and handle.fired == 0
        assert all(own[index].items() <= model[index]._forward_pre_hooks.items() for index in (0, 2))
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
    assert sorted(seen) == sorted(["0.weight (3, 4)", "0.bias (3,)", "2.weight (1, 3)", "2.bias (1,)"] * 2)
    assert isinstance(model[0], nn.Linear) and type(model[0]) is nn.Linear


def test_parameter_hooks_that_never_get_a_parameter_leave_nothing() -> None:
    """Row 48, same kind: removed before the first call."""
    model = make_lazy()
    before = [list(module._forward_pre_hooks) for module in model]
    with th.hooks(model) as hooks:
        handle = hooks.param_grad("0.weight", ignore)
        handle.remove()
        hooks.param_grad("0.bias", ignore)
    assert [list(module._forward_pre_hooks) for module in model] == before
    model(torch.ones(1, 4)).sum().backward()
    assert handle.fired == 0


def test_a_recording_of_a_lazy_model() -> None:
    """Row 48, same kind: parameters, gradients and updates, from the first call on; types and sizes as they become."""
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(1))
    with th.record(model, kinds=["output", "param", "param_grad", "update"]) as rec:
        model(torch.ones(2, 1, 5, 5)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model(torch.ones(2, 1, 5, 5)).sum().backward()
    rows = rec.table("modules").to_pylist()
    assert [row["type"] for row in rows] == ["Sequential", "Conv2d", "BatchNorm2d", "Flatten", "Linear"]
    assert [row["parameters"] for row in rows] == [0, 20, 4, 0, 19]
    values = rec.table("values").to_pylist()
    gradients = [(row["path"], row["slot"], row["step"]) for row in values if row["kind"] == "param_grad"]
    assert sorted(gradients) == [(path, name, step) for path in "013" for name in ("bias", "weight") for step in (0, 1)]
    assert len([row for row in values if row["kind"] == "param" and row["step"] == 1]) == 6
    assert rec.coverage.complete


# ---- row 50: state dict ----


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
def test_the_state_dict_is_the_same_before_during_and_after(wrap: Callable[[nn.Module], Any]) -> None:
    """Row 50: no key is added, and a strict load of the old checkpoint works while attached."""
    model = wrap(make_net())
    old = copy.deepcopy(model.state_dict())
    with (
        th.record(model, kinds=["input", "output", "grad_input", "grad_output", "param_grad"]),
        th.hooks(model) as hooks,
    ):
        hooks.forward("**", ignore)
        hooks.backward("**", ignore)
        model(torch.ones(1, 2)).sum().backward()
        during = model.state_dict()
        assert list(during) == list(old)
        result = model.load_state_dict(old, strict=True)
        assert not result.missing_keys and not result.unexpected_keys
    assert list(model.state_dict()) == list(old)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in old.items())


def test_the_users_state_dict_hooks_run_as_before() -> None:
    """Row 50, same kind: a hook of the user's that adds a key, with its metadata."""
    model = make_net()
    own = model[0]._register_state_dict_hook(
        lambda module, state, prefix, meta: state.update({f"{prefix}more": torch.ones(1)})
    )
    before = model.state_dict()
    with th.record(model):
        during = model.state_dict()
    own.remove()
    assert list(during) == list(before) and "0.more" in during
    assert during._metadata == before._metadata  # type: ignore[attr-defined]


def test_a_checkpoint_saved_in_a_session_loads_into_a_plain_model() -> None:
    """Row 50, same kind: saved while attached, to a file's bytes."""
    model, file = make_net(), io.BytesIO()
    with th.record(model, kinds=["grad_output", "param_grad"]):
        model(torch.ones(1, 2)).sum().backward()
        torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(fresh(torch.ones(1, 2)), model(torch.ones(1, 2)))


# ---- row 53: FSDP2 ----


ON_CPU = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason=f"fully_shard of torch {torch.__version__} runs on no CPU: its own stream there has no record_event",
)


def sharded(net: nn.Module, *, layers: bool = True) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in net.children() if layers else ():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


@ON_CPU
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("layers", [True, False], ids=["each layer", "root only"])
def test_gradients_of_sharded_parameters_come_once(layers: bool) -> None:
    """Row 53: tensor hooks on sharded parameters never fire; here each gradient is recorded once, DTensors are handled."""
    net, plain = sharded(make_net(), layers=layers), make_net()
    kinds = ["output", "grad_output", "grad_input", "param", "param_grad", "update"]
    x = torch.ones(1, 2, requires_grad=True)
    with th.record(net, kinds=kinds, tensors=True) as rec, th.record(plain, kinds=kinds, tensors=True) as reference:
        for model in (net, plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).sum().backward()
            optimizer.step()

    def rows(recording: th.Recorder) -> list[tuple[Any, ...]]:
        return sorted(
            (r["path"], r["kind"], r["slot"], r["mean"], r["absmax"]) for r in recording.table("values").to_pylist()
        )

    assert rows(rec) == rows(reference)
    assert [row["type"] for row in rec.table("modules").to_pylist()] == ["Sequential", "Linear", "ReLU", "Linear"]
    notes = {row["note"] for row in rec.table("values").to_pylist() if row["kind"] == "param_grad"}
    assert notes == {"statistics of this rank's shard"}
    assert rec.coverage.complete


@ON_CPU
@pytest.mark.usefixtures("process_group")
def test_accumulated_gradients_of_sharded_parameters() -> None:
    """Row 53, same kind: each pass's own gradient, and the running sum; zeroed in either way."""
    net = sharded(nn.Sequential(nn.Linear(2, 1, bias=False)))
    own: list[Any] = []
    sums: list[Any] = []
    with th.hooks(net) as hooks:
        hooks.param_grad("0.weight", lambda name, grad: own.append(grad.to_local().mean().item()))
        hooks.param_grad("0.weight", lambda name, grad: sums.append(grad.to_local().mean().item()), accumulated=True)
        for factor, set_to_none in ((1, None), (2, None), (4, False), (5, True), (6, None)):
            if set_to_none is not None:
                net.zero_grad(set_to_none=set_to_none)
            net(torch.ones(1, 2) * factor).sum().backward()
    assert own == [1, 2, 4, 5, 6]
    assert sums == [1, 3, 4, 5, 11]


@ON_CPU
@pytest.mark.usefixtures("process_group")
def test_a_gradient_of_a_sharded_parameter_is_replaced() -> None:
    """Row 53, same kind: a returned gradient counts, also in accumulation."""
    net = sharded(nn.Sequential(nn.Linear(2, 1, bias=False)))
    with th.hooks(net) as hooks:
        hooks.param_grad("0.weight", lambda name, grad: grad * 10)
        for factor in (1, 2):
            net(torch.ones(1, 2) * factor).sum().backward()
    assert net[0].weight.grad.to_local().tolist() == [[30, 30]]
