"""Functional calls in models that run in ways of their own: checkpointed, compiled, recurrent, shared; and that nothing changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tests.ops_net import Net, ops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x)) * 2


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant).sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ops_in_checkpointed_regions_are_counted_once_and_get_their_gradients(use_reentrant: bool) -> None:
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    with th.record(model, ops=True, tensors=True) as rec:
        model(x).backward()
    assert [place for place in ops(rec) if place.startswith("block")] == ["block/relu#0", "block/mul#0"]
    assert torch.equal(rec["block/relu"].grad_output, torch.full((2, 4), 2.0))
    with th.record(model, ops=True, recompute=True) as rec:
        model(x).backward()
    assert ops(rec, "recompute")[:1] == ["block/relu#0"]


def test_under_no_grad_autocast_and_inference_mode() -> None:
    model = Net()
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with th.record(model, ops=True) as rec, context:
            model(torch.ones(2, 4))
        assert "(root)/matmul#0" in ops(rec)


@pytest.fixture(scope="module")
def loaded_compiler() -> None:
    """The first compilation of a process patches nn.Module for good; that is not ours to answer for."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_compiler")
def test_a_compiled_model_runs_eager_in_the_session() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 4))
    with th.record(compiled, ops=True) as rec:
        compiled(torch.ones(2, 4))
    assert "(root)/softmax#0" in ops(rec)
    torch._dynamo.reset()


def test_steps_that_are_not_recorded_have_no_ops() -> None:
    model = Net()
    with th.record(model, ops=True, every=2) as rec:
        for _ in range(4):
            model(torch.ones(2, 4))
            rec.step()
        rec.pause()
        model(torch.ones(2, 4))
    assert [call.step for call in rec["(root)/relu"].calls] == [0, 2]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, _) = self.rnn(x)
        return out[:, -1] + h[-1]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.dropout(self.norm(self.fc(self.fc(x))), training=self.training)
        return {"y": x.view(-1).unfold(0, 2, 2).clamp_(min=0), "noise": torch.randn(3)}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.features(x), 2)
        x += 1
        return F.relu_(torch.einsum("bchw->bc", x).reshape(len(x), -1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.rand_like(x)).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in-place convolutions": (Convolutions, (2, 1, 6, 6)),
    "lstm": (Recurrent, (2, 3, 4)),
    "transformer with dropout": (Encoder, (2, 3, 8)),
    "shared module, dict output": (Shared, (3, 4)),
    "checkpointed": (lambda: Checkpointed(False), (2, 4)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [True, "all"])
def test_a_recorded_run_is_bit_for_bit_the_bare_one(name: str, how: Any) -> None:
    make, shape = MODELS[name]

    def run(recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model, x = make().train(), torch.randn(shape, requires_grad=True)
        results: list[torch.Tensor] = []

        def steps() -> None:
            for _ in range(2):
                output = model(x)
                outputs = list(output.values()) if isinstance(output, dict) else [output]
                torch.stack([one.square().sum() for one in outputs]).sum().backward()
                results.extend(one.detach() for one in outputs)

        if recorded:
            with th.record(model, ops=how, on_error="raise") as rec:
                steps()
            assert ops(rec)
        else:
            steps()
        assert x.grad is not None
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        return [*results, x.grad, *gradients, *model.buffers(), torch.get_rng_state()]

    for bare, seen in zip(run(False), run(True), strict=True):
        assert torch.equal(bare, seen)


def test_without_ops_nothing_of_this_is_there() -> None:
    model = Net()
    with th.record(model) as rec:
        seen: list[int] = []
        handle = model.a.register_forward_hook(lambda *_: seen.append(torch._C._len_torch_function_stack()))
        model(torch.ones(2, 4))
    handle.remove()
    assert seen == [0]
    assert ops(rec) == []
    assert "source" in rec.table("calls").column_names
    assert sys.gettrace() is None
