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
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.errors import EditError
from tests.edited_net import MODES, Net, Square, counts, one


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
