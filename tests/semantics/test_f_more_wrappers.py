"""Section F, row 15: plain names under sharding, quantisation and recompilation, and what is said of what cannot be seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.semantics.asking import NOT_CALLED, forward_paths, ignore, make_net, missing
from tests.semantics.test_f_state import ON_CPU, sharded
from tests.semantics.wrapping import compiled, data_parallel, distributed

pytestmark = pytest.mark.usefixtures("loaded_compiler")

PLAIN = ["", "0", "1", "2"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- sharding ----


@ON_CPU
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [lambda net: net, compiled], ids=["FSDP2", "compiled(FSDP2)"])
def test_plain_names_resolve_under_fsdp2(wrap: Callable[[nn.Module], Any]) -> None:
    """Row 15: hooks of every kind fire once, gradients of parameters come as DTensor, and names and types are the plain ones."""
    wrapped = wrap(sharded(make_net()))
    kinds: list[str] = []
    with th.hooks(wrapped) as hooks:
        handles = [
            hooks.forward_pre("0", ignore),
            hooks.forward("0", ignore),
            hooks.backward_pre("0", ignore),
            hooks.backward("0", ignore),
            hooks.param_grad("0.weight", lambda name, gradient: kinds.append(f"{name} {type(gradient).__name__}")),
        ]
        wrapped(torch.ones(1, 2)).sum().backward()
    assert [handle.paths for handle in handles] == [["0"]] * 4 + [["0.weight"]]
    assert [handle.fired for handle in handles] == [1] * 5
    assert kinds == ["0.weight DTensor"]
    with th.record(wrapped) as rec:
        wrapped(torch.ones(1, 2)).sum().backward()
    assert forward_paths(rec) == PLAIN
    assert [row["type"] for row in rec.table("modules").to_pylist()] == ["Sequential", "Linear", "ReLU", "Linear"]


@pytest.mark.filterwarnings("ignore:.*(FSDP|FullyShardedDataParallel|no_shard|NO_SHARD|world size).*")
@pytest.mark.usefixtures("process_group")
def test_plain_names_resolve_under_the_first_fsdp() -> None:
    """Row 15, same kind: its prefix is no part of a name; the gradient is that of its flat parameter, which is all that there is."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        wrapped = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"FSDP of torch {torch.__version__} runs on no CPU: {error}")
    with th.hooks(wrapped) as hooks, th.record(wrapped, kinds=["output", "grad_output", "param_grad"]) as rec:
        handles = [hooks.forward("0", ignore), hooks.backward("_fsdp_wrapped_module.0", ignore)]
        wrapped(torch.ones(1, 2)).sum().backward()
    assert [(handle.paths, handle.fired) for handle in handles] == [(["0"], 1)] * 2
    assert forward_paths(rec) == PLAIN
    assert rec.coverage.complete
    gradients = [row for row in rec.table("values").to_pylist() if row["kind"] == "param_grad"]
    assert [(row["path"], row["slot"]) for row in gradients] == [("", "_flat_param")]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [distributed, data_parallel, compiled], ids=["DDP", "DataParallel", "compiled"])
def test_edits_and_gradients_under_a_wrapper_are_those_of_the_plain_model(wrap: Callable[[nn.Module], Any]) -> None:
    """Row 15, same kind: by plain names, with accumulation over two backward passes."""

    def run(net: nn.Module) -> tuple[list[torch.Tensor], Any]:
        with th.edit(net) as edit, th.record(net, kinds=["output", "param_grad"]) as rec:
            edit.output("0", th.edits.scale(3.0))
            edit.param_grad("2.weight", th.edits.scale(0.5))
            for factor in (1.0, 2.0):
                net(torch.ones(1, 2) * factor).sum().backward()
        rows = rec.query("select path, kind, slot, step, call, absmax, digest from values order by all").to_pylist()
        return [one.grad for one in net.parameters()], rows  # type: ignore[misc]

    gradients, rows = run(make_net())
    found, recorded = run(wrap(make_net()))
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))
    assert recorded == rows


# ---- recompilation ----


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["automatic", "dynamic", "static"])
def test_shapes_that_change_from_call_to_call(dynamic: bool | None) -> None:
    """Rows 13 and 17, same kind: before, within and after a session, with the shapes that torch recompiles for."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    net = make_net()
    wrapped: Any = torch.compile(net, backend=backend, dynamic=dynamic)
    sizes = (2, 3, 4, 5)
    expected = [net(torch.ones(size, 2)) for size in sizes]
    assert all(torch.equal(wrapped(torch.ones(size, 2)), out) for size, out in zip(sizes, expected, strict=True))
    before = len(graphs)
    with th.hooks(wrapped) as hooks, th.record(wrapped) as rec:
        handle = hooks.forward("0", lambda module, args, output: output + 100)
        assert not any(
            torch.equal(wrapped(torch.ones(size, 2)), out) for size, out in zip(sizes, expected, strict=True)
        )
    assert handle.fired == 4
    assert forward_paths(rec) == PLAIN * 4
    assert len(graphs) == before
    assert all(torch.equal(wrapped(torch.ones(size, 2)), out) for size, out in zip(sizes, expected, strict=True))
    assert len(graphs) == before
    assert handle.fired == 4


# ---- quantisation ----


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["prepared", "fake", "converted"])
def test_statically_quantised_models(form: str) -> None:
    """Row 15, same kind: prepared, trained with fake quantisation, and converted; quantised values have a reason for no statistics."""
    quantisation = torch.ao.quantization
    net = nn.Sequential(quantisation.QuantStub(), nn.Linear(2, 2), nn.ReLU(), quantisation.DeQuantStub())
    engine = torch.backends.quantized.supported_engines[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "fake":
            net.train().qconfig = quantisation.get_default_qat_qconfig(engine)  # type: ignore[assignment]
            quantisation.prepare_qat(net, inplace=True)
        else:
            net.eval().qconfig = quantisation.get_default_qconfig(engine)  # type: ignore[assignment]
            quantisation.prepare(net, inplace=True)
        net(torch.ones(1, 2))
        if form == "converted":
            quantisation.convert(net, inplace=True)
        bare = net(torch.ones(1, 2))
        with th.record(net, kinds=["input", "output"], on_error="raise") as rec:
            assert torch.equal(net(torch.ones(1, 2)), bare)
    assert [path for path in forward_paths(rec) if path.count(".") == 0] == ["", "0", "1", "2", "3"]
    rows = {(row["path"], row["kind"]): row for row in rec.table("values").to_pylist() if "." not in row["path"]}
    if form == "converted":
        assert rows["1", "output"]["dtype"] == "quint8"
        assert rows["1", "output"]["note"] == "quantised tensor: no statistics"
        reason = "weights used without calling the module: it holds those of a quantised one"
        assert missing(rec) == {"1._packed_params": reason}
    else:
        assert rows["1", "output"]["mean"] is not None
        observers = [
            path for path in forward_paths(rec) if "." in path and form == "fake"
        ]  # each holds one that it never calls
        assert missing(rec) == {f"{path}.activation_post_process": NOT_CALLED for path in observers}
        assert "1.activation_post_process" in forward_paths(rec)
    assert rows["", "output"]["mean"] == pytest.approx(bare.mean().item())
