"""``th.edit`` where only PyTorch has the trap: checkpointing of both kinds, torch.func, mixed precision, compile, copies."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.errors import EditError


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Net(nn.Module):
    """y = (w x)^2 with w = 1, under checkpointing or not."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__()
        self.reentrant = reentrant
        self.block = nn.Sequential(nn.Linear(1, 1, bias=False), Square())
        nn.init.ones_(self.block[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)


def one() -> torch.Tensor:
    return torch.ones(1, 1, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: th.edits.clip_norm(-1), r"clip_norm: max_norm=-1\n  give a number above 0"),
        (lambda: th.edits.clip_norm(0), "clip_norm: max_norm=0"),
        (lambda: th.edits.clip_norm(torch.tensor(-1.0)), "clip_norm: max_norm="),
        (lambda: th.edits.clip_value(float("nan")), "clip_value: limit=nan"),
        (lambda: th.edits.noise(-0.1), r"noise: std=-0\.1\n  give a standard deviation of 0 or more"),
        (lambda: th.edits.noise(float("nan")), "noise: std=nan"),
        (lambda: th.edits.normalise(-2.0), r"normalise: to=-2\.0"),
        (lambda: th.edits.clamp(1, -1), "clamp: min=1 is above max=-1"),
        (lambda: th.edits.clamp(max=float("nan")), "clamp: max=nan"),
        (lambda: th.edits.scale("a"), r"scale: factor is a number or a tensor, not str 'a'\n  for example"),
        (lambda: th.edits.scale(None), "scale: factor is a number or a tensor, not NoneType"),
        (lambda: th.edits.add(["a"]), "add: amount is a number or a tensor, not list"),
        (lambda: th.edits.clip_norm("a"), "clip_norm: max_norm is a number or a tensor, not str"),  # type: ignore[arg-type]
    ],
)
def test_values_that_make_no_sense_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(EditError, match=said):
        make()


def test_values_at_the_bounds_are_taken() -> None:
    assert repr(th.edits.noise(0.0)) == "noise(0.0, seed=0)" and repr(th.edits.clamp(1, 1)) == "clamp(min=1, max=1)"
    assert (
        repr(th.edits.clip_norm(float("inf"))) == "clip_norm(inf)" and repr(th.edits.scale([1, 2])) == "scale([1, 2])"
    )
    assert repr(th.edits.clamp(float("-inf"), 0)) == "clamp(min=-inf, max=0)"


@pytest.mark.parametrize("edits", [{"f": lambda v: v}, [th.edits.zero(), lambda v: v], lambda v: v, "zero"])
def test_only_values_of_edits_are_saved(edits: Any, tmp_path: Path) -> None:
    with pytest.raises(EditError, match=r"th\.edits\.save writes values of th\.edits only, and .* is (function|str)"):
        th.edits.save(edits, tmp_path / "edits.json")
    assert not list(tmp_path.iterdir())


def counts(model: nn.Module) -> list[int]:
    return [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + ("_compiled_call_impl" in vars(m)) for m in model.modules()
    ]


MODES = pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])


# ---- checkpointing ----


@MODES
@pytest.mark.parametrize("closes", [True, False], ids=["closed before backward", "open"])
@pytest.mark.parametrize("kind", ["input", "output", "skip"])
def test_values_under_checkpointing(reentrant: bool | None, closes: bool, kind: str) -> None:
    """71: 18 for an edit that makes it (3 w x)^2."""
    model, x = Net(reentrant), one()
    edit = th.edit(model).start()
    if kind == "input":
        edit.input("block.1", lambda v: v * 3)
    elif kind == "output":
        edit.output("block.0", lambda v: v * 3, call=0)
    else:
        edit.skip("block.0", lambda v: v * 3)
    out = model(x)
    if closes:
        edit.close()
        assert not any(counts(model))
    out.sum().backward()
    assert x.grad is not None and x.grad.item() == 18
    edit.close()
    assert not any(counts(model))
    assert edit.fired == 1
    assert model(one()).item() == 1


@MODES
def test_gradients_under_checkpointing(reentrant: bool | None) -> None:
    model, x = Net(reentrant), one()
    with th.edit(model) as edit:
        outer = edit.grad_output("block.0", lambda g: g * 5)
        inner = edit.grad_input("block.1", lambda g: g * 7)
        model(x).sum().backward()
        assert x.grad is not None and x.grad.item() == 2 * 5 * 7
        assert (outer.fired, inner.fired) == (1, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_call_of_a_shared_module_is_edited_in_its_recomputation_alone(reentrant: bool) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.square = nn.Linear(1, 1, bias=False), Square()
            nn.init.constant_(self.layer.weight, 2)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.square(self.layer(self.layer(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=reentrant)

    model, x = Shared(), one()
    with th.edit(model) as edit:
        edit.output("layer", lambda v: v * v, call=1)
        out = model(x)
    out.sum().backward()
    y, expected = Shared(), one()
    ((y.layer(y.layer(expected)) ** 2) ** 2).sum().backward()
    assert x.grad is not None and expected.grad is not None
    assert torch.equal(x.grad, expected.grad)
    assert torch.equal(model.layer.weight.grad, y.layer.weight.grad)  # type: ignore[arg-type]


def test_noise_is_the_same_in_a_recomputation_and_touches_no_random_state() -> None:
    gradients = []
    for reentrant in (None, False, True):
        model, x = Net(reentrant), one()
        state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
        with th.edit(model) as edit:
            edit.output("block.0", th.edits.noise(0.5, seed=3))
            out = model(x)
        out.sum().backward()
        assert torch.equal(state[0], torch.random.get_rng_state())
        assert (state[1] == np.random.get_state()[1]).all()  # type: ignore[index]
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    assert gradients[0].item() != 2


@MODES
@pytest.mark.parametrize("closes", [True, False], ids=["closed before backward", "open"])
def test_stop_under_checkpointing(reentrant: bool | None, closes: bool) -> None:
    """What it gives is differentiated as ever; with reentry, which runs the region without a graph, it has none."""
    model, x = Net(reentrant), one()
    edit = th.edit(model).start()
    edit.output("block.0", lambda v: v * 3)
    edit.stop("block.0")
    value = edit.run(model, x)
    if closes:
        edit.close()
    assert value.item() == 3 and value.requires_grad == (reentrant is not True)
    if value.requires_grad:
        value.sum().backward()
        assert x.grad is not None and x.grad.item() == 3
    edit.close()
    assert not any(counts(model))
    again = one()
    model(again).sum().backward()
    assert again.grad is not None and again.grad.item() == 2


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


# ---- transforms, modes, precision ----


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


# ---- parameters ----


def test_clipping_together_is_clip_grad_norm_before_the_step() -> None:
    def build() -> tuple[nn.Sequential, torch.optim.SGD]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    x = torch.randn(4, 3)
    written, optimizer = build()
    for _ in range(2):
        written(x).pow(2).sum().backward()
    torch.nn.utils.clip_grad_norm_(written.parameters(), 0.5)
    optimizer.step()
    model, optimizer = build()
    with th.edit(model) as edit:
        handle = edit.param_grad("**", th.edits.clip_norm(0.5, together=True))
        for _ in range(2):
            model(x).pow(2).sum().backward()
        optimizer.step()
    assert handle.fired == 1
    for mine, theirs in zip(model.parameters(), written.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_of_parameters_are_those_of_one_pass_and_requires_grad_is_left_alone() -> None:
    model, x = Net(), one()
    model.block[0].bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    flags = [p.requires_grad for p in model.parameters()]
    with th.edit(model) as edit:
        edit.param_grad("block.0.weight", th.edits.clip_value(0.5))
        for expected in (0.5, 1.0):
            model(x).sum().backward()
            assert model.block[0].weight.grad.item() == expected  # type: ignore[union-attr]
        frozen = edit.param_grad("block.0.bias", th.edits.zero())
        assert "no gradient: requires_grad=False" in str(edit)
        frozen.remove()
        edit._handles.remove(frozen)
    assert [p.requires_grad for p in model.parameters()] == flags


# ---- nothing left behind ----


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["input", "output", "grad_output", "grad_input", "skip"])
def test_nothing_is_left_after_an_error(error: type[BaseException], kind: str) -> None:
    model, x = Net(), one()
    before = [set(vars(m)) for m in model.modules()]

    def fail(value: Any) -> Any:
        raise error("no")

    with pytest.raises(error, match="no"), th.edit(model) as edit:
        edit.stop("block", step=9)
        getattr(edit, kind)("block.1", fail)
        model(x).sum().backward()
    assert not any(counts(model))
    assert [set(vars(m)) for m in model.modules()] == before
    assert model(x).item() == 1


def test_two_sessions_skip_one_module_and_leave_in_any_order() -> None:
    model = Net()
    first, second = th.edit(model).start(), th.edit(model).start()
    first.skip("block.1")
    second.skip("block.1", lambda v: v * 3)
    assert model(torch.ones(1, 1)).item() == 3
    with pytest.warns(th.TenterhookWarning, match="never ran"):  # the second stood around it
        first.close()
    assert model(torch.ones(1, 1)).item() == 3
    second.close()
    assert not any(counts(model))
    assert model(torch.ones(1, 1)).item() == 1


def test_copies_and_pickles_carry_no_edit() -> None:
    model = Net()
    with th.edit(model) as edit:
        edit.skip("block.1", lambda v: v * 3)
        edit.output("block.0", th.edits.scale(2))
        assert model(torch.ones(1, 1)).item() == 6
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert pickle.loads(pickle.dumps(model))(torch.ones(1, 1)).item() == 1
        assert twin(torch.ones(1, 1)).item() == again(torch.ones(1, 1)).item() == 1
        assert set(model.state_dict()) == {"block.0.weight"}


def test_handles_come_off_one_by_one() -> None:
    model = Net()
    with th.edit(model) as edit:
        first = edit.output("block.0", th.edits.scale(2))
        with edit.output("block.0", th.edits.scale(5)):
            assert model(torch.ones(1, 1)).item() == 100
        assert model(torch.ones(1, 1)).item() == 4
        first.remove()
        assert model(torch.ones(1, 1)).item() == 1
        assert counts(model) == [2, 0, 0, 0]  # the root's, by which steps are counted
        edit.output("block.0", th.edits.scale(3))
        assert model(torch.ones(1, 1)).item() == 9


def test_hooks_of_others_keep_their_places() -> None:
    """36: edits apply in attach order with the hooks of other libraries; ours that only look see the result."""
    model, seen = Net(), []
    model.block[0].register_forward_hook(lambda module, args, output: output + 1)
    with th.hooks(model) as hooks:
        hooks.forward("block.0", lambda module, args, output: seen.append(output.item()))
        theirs = model.block[0].register_forward_hook(lambda module, args, output: output * 100)
        with th.edit(model) as edit:
            edit.output("block.0", th.edits.scale(3))
            assert model(torch.ones(1, 1)).item() == 600**2
    theirs.remove()
    assert seen == [6.0]


def test_a_patch_of_another_dtype_and_one_of_another_place_are_refused() -> None:
    model, x = Net(), one()
    with th.record(model, "block.0", tensors=True) as clean:
        model(x)
    with th.edit(model) as edit, pytest.raises(th.TenterhookError, match=r"block\.1"):
        edit.output("block.1", th.edits.patch(clean))
        model(x)
    with th.edit(model) as edit, pytest.raises(th.TenterhookError, match=r"the recording holds no block\.0:output#1"):
        edit.output("block.0", th.edits.patch(clean))
        model.block[0](model.block[0](x))
    model.bfloat16()
    refused = r"patch at block\.0:output#0@0: the recording has dtype float32, the model bfloat16"
    with th.edit(model) as edit, pytest.raises(EditError, match=refused) as caught:
        edit.output("block.0", th.edits.patch(clean))
        model(x.bfloat16())
    if sys.version_info >= (3, 11):
        assert any("raised by patch(<Recorder of Net" in note for note in caught.value.__notes__)


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


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda v: v.double(), "dtype float64, it was float32"),
        (lambda v: v[0], r"shape \(1,\), it was \(1, 1\)"),
        (lambda v: (v, v), "another structure: Tensor against tuple"),
        (lambda v: v.to("meta"), "device meta, it was cpu"),
    ],
)
def test_what_changes_without_leave_is_refused(fn: Callable[[Any], Any], message: str) -> None:
    model = Net()
    for kind in ("output", "grad_output"):
        with pytest.raises(EditError, match=rf"edit of {kind} of block\.0 .*{message}"), th.edit(model) as edit:
            getattr(edit, kind)("block.0", fn)
            model(one()).sum().backward()
    with th.edit(model) as edit:
        edit.output("block.1", lambda v: v.double(), allow="dtype")
        assert model(one()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:edits that never ran")
@pytest.mark.parametrize("again", [True, False], ids=["called again", "closed"])
@pytest.mark.parametrize("kind", ["interrupt", "stop"])
def test_a_call_that_ends_past_all_hooks_lets_go_of_its_inputs(kind: str, again: bool) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "interrupt" and not x.isfinite().all():
                raise KeyboardInterrupt
            return x * 2

    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(Interrupted(), nn.ReLU()))
    edit = th.edit(model).start()
    edit.grad_input("1", th.edits.scale(0.5))
    if kind == "stop":
        edit.stop("1.0", step=0)
    inputs: list[Any] = []
    with th.hooks(model[1]) as hooks:
        hooks.forward_pre("", lambda module, args: inputs.append(weakref.ref(args[0])))
        with contextlib.suppress(KeyboardInterrupt):
            edit.run(model, torch.full((1, 1), torch.nan))
    if again:
        edit.step()
        model(one())
    else:
        edit.close()
    gc.collect()
    edit.stopped = None
    assert inputs[0]() is None
    edit.close()
