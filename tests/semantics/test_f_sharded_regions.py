"""Rows 53 and 11: parameters sharded by FSDP2 in regions of activation checkpointing, nested, shared, and in part outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tests.semantics.test_f_state import ON_CPU

pytestmark = [ON_CPU, pytest.mark.usefixtures("process_group")]
KINDS = ["input", "output", "grad_output", "grad_input", "param", "param_grad", "update"]
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
SHARDED = pytest.mark.parametrize("layers", ["blocks", "layers", "root"])
SHAPE = pytest.mark.parametrize("shape", ["one", "two", "nested", "shared"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lin(x).tanh())


class Net(nn.Module):
    def __init__(self, shape: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.reentrant = shape, reentrant
        self.first = nn.Linear(2, 2)
        self.a, self.b = Block(), Block()
        self.last = nn.Linear(2, 2)

    def region(self, fn: Any, x: Tensor) -> Tensor:
        return checkpoint(fn, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.shape == "one":
            x = self.b(self.region(self.a, x))
        elif self.shape == "two":
            x = self.region(self.b, self.region(self.a, x))
        elif self.shape == "nested":
            x = self.region(lambda value: self.b(self.region(self.a, value)), x)
        else:
            x = self.a(self.region(self.a, x))
            x = self.region(self.b, x)
        return self.last(x)


def sharded(net: Net, layers: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    inner = {
        "blocks": (net.a, net.b),
        "layers": (net.first, net.a.lin, net.a.out, net.b.lin, net.b.out, net.last),
        "root": (),
    }
    for module in inner[layers]:
        fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def X() -> Tensor:
    return torch.tensor([[0.3, -0.7]], requires_grad=True)


def whole(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(net: Any, times: int = 3) -> tuple[list[Any], list[Tensor]]:
    """Outputs and gradients of the input, and what the parameters are in the end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(times):
        x = X()
        optimizer.zero_grad()
        output = net(x)
        output.square().sum().backward()
        seen.append((output.tolist(), None if x.grad is None else x.grad.tolist()))
        optimizer.step()
    return seen, [whole(parameter.detach()) for parameter in net.parameters()]


def rows(rec: th.Recorder) -> list[tuple[Any, ...]]:
    return sorted(
        (
            row["step"],
            row["path"],
            row["kind"],
            row["slot"],
            row["call"],
            row["phase"] or "",
            row["mean"] or 0.0,
            row["absmax"] or 0.0,
        )
        for row in rec.table("values").to_pylist()
    )


def torch_gives_another_gradient(shape: str, layers: str, reentrant: bool) -> bool:
    """FSDP2 itself loses a part where what it shards by itself is used in a reentrant region and outside; nobody to compare with then."""
    return shape == "shared" and reentrant and layers != "root"


def calls(rec: th.Recorder) -> list[tuple[Any, ...]]:
    return [(call.step, call.path, call.call, call.phase) for call in rec.order()]


@REENTRANT
@SHARDED
@SHAPE
def test_a_recording_has_what_that_of_the_plain_model_has(shape: str, layers: str, reentrant: bool) -> None:
    """53 and 11, W: the same calls, values and gradients, each once; and the run is the same."""
    bare = train(sharded(Net(shape, reentrant), layers))
    net, plain = sharded(Net(shape, reentrant), layers), Net(shape, reentrant)
    with th.record(net, kinds=KINDS, tensors=True) as rec:
        given = train(net)
    with th.record(plain, kinds=KINDS, tensors=True) as reference:
        train(plain)
    assert given[0] == bare[0] and all(map(torch.equal, given[1], bare[1]))
    if torch_gives_another_gradient(shape, layers, reentrant):
        return
    assert calls(rec) == calls(reference)
    assert rows(rec) == rows(reference)
    assert rec.coverage.complete == reference.coverage.complete


@REENTRANT
@SHARDED
@SHAPE
def test_hooks_on_gradients_of_parameters_run_once_a_pass(shape: str, layers: str, reentrant: bool) -> None:
    """53 and 42, W: with the whole gradient, of this pass and as running sum; a returned one counts."""
    net, plain = sharded(Net(shape, reentrant), layers), Net(shape, reentrant)
    got: dict[str, list[tuple[str, Tensor]]] = {"own": [], "sum": [], "plain own": [], "plain sum": []}
    for model, name in ((net, ""), (plain, "plain ")):
        with th.hooks(model) as hooks:
            hooks.param_grad("**", lambda path, grad, to=got[f"{name}own"]: to.append((path, whole(grad).clone())))
            hooks.param_grad(
                "**", lambda path, grad, to=got[f"{name}sum"]: to.append((path, whole(grad).clone())), accumulated=True
            )
            hooks.param_grad("first.weight", lambda path, grad: grad * 3)
            for _ in range(2):
                model(X()).square().sum().backward()
    if torch_gives_another_gradient(shape, layers, reentrant):
        return
    for kind in ("own", "sum"):
        ours, expected = (sorted(got[f"{name}{kind}"], key=lambda one: one[0]) for name in ("", "plain "))
        assert [path for path, _ in ours] == [path for path, _ in expected]
        assert len(ours) == 2 * len(list(plain.parameters()))
        for (_, one), (_, other) in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other)  # a shard's is what came to the running sum: the last bits differ
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(whole(one.grad), other.grad)


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended before the backward pass"])
@REENTRANT
@SHARDED
def test_edits_in_a_region_give_the_gradient_of_the_plain_model(layers: str, reentrant: bool, ended: bool) -> None:
    """53 and 71, W: of outputs and of gradients."""
    results = []
    for model in (sharded(Net("two", reentrant), layers), Net("two", reentrant)):
        with th.edit(model) as edit:
            edit.output("a.lin", th.edits.scale(2.0))
            if not ended:
                edit.grad_output("b", th.edits.scale(0.5))
            output = model(X()).square().sum()
            if not ended:
                output.backward()
        if ended:
            output.backward()
        results.append([whole(parameter.grad) for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
