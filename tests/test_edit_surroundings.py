"""Edits where a model is not run plainly: transforms, mixed precision, in-place layers, compiled code, loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tenterhook as th
from tests.edited_net import MODES, Net, counts, one

SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@MODES
def test_skip_and_stop_in_all_surroundings(surrounding: str, reentrant: bool | None) -> None:
    model, x = Net(reentrant), torch.full((1, 1), 3.0, requires_grad=True)
    with SURROUNDINGS[surrounding]():
        assert model(x).item() == 9
        assert th.edit(model).skip("block.1").run(model, x).item() == 3
        assert th.edit(model).skip("block").run(model, x).item() == 3
        assert th.edit(model).stop("block.0").run(model, x).item() == 3
        assert th.edit(model).stop("block.1").run(model, x).item() == 9
        assert model(x).item() == 9
    assert not any(counts(model))


def test_skip_and_stop_in_transforms_in_place_layers_shared_modules_and_loops() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    model, x = nn.Sequential(layer, nn.ReLU(inplace=True), layer), torch.randn(4, 3)
    after = torch.relu(layer(x))
    assert torch.equal(th.edit(model).stop("1").run(model, x), after)
    assert torch.equal(th.edit(model).stop("0", call=1).run(model, x), layer(after))
    assert torch.equal(th.edit(model).skip("0", call=1).run(model, x), after)
    assert torch.equal(th.edit(model).skip("1").run(model, x), layer(layer(x)))
    weights = dict(model.named_parameters())
    with th.edit(model) as edit:
        edit.skip("1")
        assert torch.equal(torch.func.vmap(model)(x), layer(layer(x)))
        found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
        written = torch.func.grad(
            lambda w: F.linear(F.linear(x, w["0.weight"], w["0.bias"]), w["0.weight"], w["0.bias"]).sum()
        )(weights)
        assert all(torch.equal(found[name], written[name]) for name in weights)
    with th.edit(model) as edit:
        edit.stop("1")
        values = torch.func.vmap(lambda one: edit.run(model, one))(x)
        assert torch.equal(values, after)
    with th.edit(model) as edit, torch.no_grad():
        edit.skip("1", step=1)
        edit.stop("1", step=2)
        y = x
        for expected in (
            lambda y: layer(torch.relu(layer(y))),
            lambda y: layer(layer(y)),
            lambda y: torch.relu(layer(y)),
        ):
            wanted = expected(y)
            y = edit.run(model, y)
            assert torch.equal(y, wanted)
    assert not any(counts(model))


def test_transforms_of_torch_func() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    weights = dict(model.named_parameters())
    x = torch.randn(4, 3)

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).pow(2).sum()

    def written(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, weights["0.weight"], weights["0.bias"]) * 0.5).pow(2).sum()

    with th.edit(model) as edit:
        edit.output("0", th.edits.scale(0.5))
        for transform in (torch.func.grad, torch.func.jacrev):
            for name, gradient in transform(loss)(weights, x).items():
                assert torch.equal(gradient, transform(written)(weights, x)[name])
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        expected = torch.func.vmap(torch.func.grad(written), in_dims=(None, 0))(weights, x)
        assert all(torch.equal(per_sample[name], expected[name]) for name in weights)
        edit.output("1", th.edits.zero(dim=-1, index=0))
        assert not torch.func.vmap(model)(x)[:, 0].any()


def test_mixed_precision_keeps_the_dtype_and_scaled_losses_are_unscaled_for_edits() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(8, 4)

    class Scaler:
        def get_scale(self) -> float:
            return 1024.0

    seen = []
    with th.edit(model, scaler=Scaler()) as edit, torch.autocast("cpu", torch.bfloat16):
        for value in (
            th.edits.scale(0.5),
            th.edits.add(np.ones(4)),
            th.edits.clip_norm(1.0),
            th.edits.noise(0.1),
            th.edits.normalise(),
        ):
            edit.output("0", value)
        edit.output("0", lambda v: seen.append(v.dtype))
        edit.grad_output("2", lambda g: seen.append(g.clone()))
        edit.param_grad("2.bias", th.edits.clip_norm(0.5))
        (model(x).float().sum() * 1024).backward()
    assert seen[0] == torch.bfloat16
    assert torch.equal(seen[1], torch.ones(8, 1))
    bias = model[2].bias.grad
    assert bias is not None and bias.item() == pytest.approx(0.5 * 1024, rel=1e-5)


def test_no_grad_and_inference_mode() -> None:
    model, x = Net(), torch.ones(1, 1)
    with th.edit(model) as edit:
        edit.output("block.0", th.edits.scale(3))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert model(x).item() == 9
        assert not model(x).detach().requires_grad


def test_in_place_layers() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))

    x = torch.randn(5, 3)
    written = build()
    h = written[0](x) * 2
    h.register_hook(lambda g: g * 0.5)
    h = torch.relu(h)
    h.register_hook(lambda g: g + 0.1)
    written[2](h).sum().backward()
    model = build()
    with th.edit(model) as edit:
        edit.output("0", lambda v: v.mul_(2))
        edit.grad_output("0", lambda g: g * 0.5)
        edit.grad_output("1", lambda g: g + 0.1)
        model(x).sum().backward()
    for mine, theirs in zip(model.parameters(), written.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    model = build()
    with th.edit(model) as edit:
        edit.grad_input("1", lambda g: g * 0)
        model(x).sum().backward()
    assert not model[0].weight.grad.any()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def compiled_model() -> Any:
    """A model that has been compiled: with its first compilation torch changes ``Module.__init__`` for good."""
    model = Net()
    made = torch.compile(model, backend="eager")
    assert made(torch.ones(1, 1)).item() == 1
    return made


def test_a_compiled_model_runs_eager_and_is_edited(compiled_model: Any) -> None:
    compiled = compiled_model
    with th.edit(compiled) as edit:
        edit.output("block.0", th.edits.scale(3))
        assert compiled(torch.ones(1, 1)).item() == 9
        assert "eager" in str(edit)
    assert compiled(torch.ones(1, 1)).item() == 1


def test_a_module_compiled_in_place_can_be_skipped() -> None:
    model = Net()
    model.block.compile(backend="eager")
    call = model.block._compiled_call_impl
    with th.edit(model) as edit:
        edit.skip("block", lambda v: v * 3)
        assert model(torch.ones(1, 1)).item() == 3
    assert model.block._compiled_call_impl is call


def test_generation_loop() -> None:
    """Each forward of the model is a step: the prompt is step 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))

    def generate(tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
        return tokens

    plain = generate([1], 4)
    with th.edit(model) as edit, torch.no_grad():
        edit.output("1", lambda v: v.clone().index_fill_(2, torch.tensor([7]), 1e9), step=2)
        tokens = generate([1], 4)
    assert tokens[:3] == plain[:3] and tokens[3] == 7


def test_a_real_scaler() -> None:
    model, x = Net(), one()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with th.edit(model, scaler=scaler) as edit:
        edit.grad_output("block.1", lambda gradient: seen.append(gradient.item()))
        edit.param_grad("**", th.edits.clip_norm(0.5))
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
    assert seen == [1.0]
    assert model.block[0].weight.item() == pytest.approx(1 - 0.5)
