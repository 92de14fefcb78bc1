"""Section B, row 71: an edit that comes off before ``backward`` still shapes the gradient of a checkpointed region."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tenterhook as th

MODES = pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
CHECKPOINTED = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])

# y = (3 w x)^2 with w = x = 1: the edit is seen in the value of the saved tensor, so a recomputation without it gives 6 for 18.
RIGHT = 18.0


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def _times_3(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


class Net(nn.Module):
    """``blocks`` of Linear and Square, each under checkpointing; ``reentrant=None`` leaves it out."""

    def __init__(self, reentrant: bool | None, blocks: int = 1):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1, 1, bias=False), Square()) for _ in range(blocks))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def run(self, fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return fn(x) if self.reentrant is None else checkpoint(fn, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _one() -> torch.Tensor:
    return torch.ones(1, 1, requires_grad=True)


def _hook_counts(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@MODES
def test_output_edit_removed_before_backward(reentrant: bool | None):
    """71, W: 18.0 for the input and the weight, and nothing on the model in between or afterwards."""
    model, x = Net(reentrant), _one()
    with th.hooks(model) as hooks:
        handle = hooks.forward("blocks.0.0", _times_3)
        out = model(x)
    assert out.item() == 9
    assert not any(_hook_counts(model))
    out.sum().backward()
    assert x.grad.item() == model.blocks[0][0].weight.grad.item() == RIGHT
    assert not any(_hook_counts(model))
    assert handle.fired == 1
    assert model(_one()).item() == 1


@MODES
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_input_edit_removed_before_backward(reentrant: bool | None, with_kwargs: bool):
    """71, W: the same for an edit of the input, positional and by ``with_kwargs``."""
    model, x = Net(reentrant), _one()

    def edit(module: nn.Module, args: tuple[torch.Tensor, ...], *kwargs: Any) -> Any:
        return ((args[0] * 3,), *kwargs) if kwargs else args[0] * 3

    with th.hooks(model) as hooks:
        hooks.forward_pre(Square, edit, with_kwargs=with_kwargs)
        out = model(x)
    out.sum().backward()
    assert x.grad.item() == RIGHT
    assert not any(_hook_counts(model))


@MODES
def test_in_place_edit_that_returns_none(reentrant: bool | None):
    """71, W: a callback that changes the value in place is an edit, too."""
    model, x = Net(reentrant), _one()
    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", lambda module, args, output: output.mul_(3) and None)
        out = model(x)
    out.sum().backward()
    assert x.grad.item() == RIGHT


@CHECKPOINTED
def test_handle_removed_alone_and_hook_still_on(reentrant: bool):
    """71, W: one handle removed, the other still on: each edit is applied once in the recomputation."""
    model, x = Net(reentrant), _one()
    with th.hooks(model) as hooks:
        first = hooks.forward("blocks.0.0", lambda module, args, output: output * 1.5)
        hooks.forward("blocks.0.0", lambda module, args, output: output * 2)
        out = model(x)
        first.remove()
        out.sum().backward()
        assert x.grad.item() == RIGHT
        assert _hook_counts(model)[-2:] == [1, 0]
    assert not any(_hook_counts(model))


@CHECKPOINTED
def test_session_left_through_an_exception(reentrant: bool):
    """71, W: an exception ends the session after the forward; nothing stays on, the gradient is right."""
    model, x = Net(reentrant), _one()
    kept: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        kept.append(model(x))
        1 / 0  # noqa: B018
    assert not any(_hook_counts(model))
    kept[0].sum().backward()
    assert x.grad.item() == RIGHT


@CHECKPOINTED
def test_exception_inside_the_region(reentrant: bool):
    """71, W: the forward raises in the checkpointed region after an edit; the next, unedited run is clean."""

    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model = Net(reentrant)
    block = model.blocks[0]
    block.append(Raising())
    with pytest.raises(ValueError, match="no"), th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        model(_one())
    assert not any(_hook_counts(model))
    del block[2]
    x = _one()
    model(x).sum().backward()
    assert x.grad.item() == 2


@CHECKPOINTED
def test_backward_never_run(reentrant: bool):
    """71, W: where no backward follows, nothing is left on the model and nothing of the edit lives on with it."""
    model = Net(reentrant)

    class Factor:
        value = 3

    factor = Factor()
    freed: list[bool] = []
    import weakref

    weakref.finalize(factor, freed.append, True)

    def edit(module: nn.Module, args: Any, output: torch.Tensor, factor: Factor = factor) -> torch.Tensor:
        return output * factor.value

    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", edit)
        out = model(_one())
    assert not any(_hook_counts(model))
    del hooks, edit, factor, out
    gc.collect()
    assert freed


@CHECKPOINTED
def test_backward_twice_over_a_retained_graph(reentrant: bool):
    """71, W: each backward recomputes with the edit."""
    model, x = Net(reentrant), _one()
    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        out = model(x)
    out.sum().backward(retain_graph=True)
    assert x.grad.item() == RIGHT
    x.grad = None
    out.sum().backward()
    assert x.grad.item() == RIGHT
    assert not any(_hook_counts(model))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch, of reentry in reentry
@CHECKPOINTED
@pytest.mark.parametrize("inner", [False, True], ids=["in non-reentrant", "in reentrant"])
def test_nested_checkpoints(reentrant: bool, inner: bool):
    """71, W: a checkpoint in a checkpoint, of either kind; the inner region is recomputed with the edit as well."""
    model = Net(inner, blocks=2)
    x = _one()

    def edited() -> torch.Tensor:
        with th.hooks(model) as hooks:
            hooks.forward("blocks.0.0", _times_3)
            hooks.forward_pre("blocks.1.1", lambda module, args: args[0] * 2)
            return checkpoint(model, x, use_reentrant=reentrant)

    out = edited()
    assert not any(_hook_counts(model))
    out.sum().backward()
    plain = Net(None, blocks=2)
    truth = _one()
    with th.hooks(plain) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        hooks.forward_pre("blocks.1.1", lambda module, args: args[0] * 2)
        plain(truth).sum().backward()
    assert x.grad.item() == truth.grad.item() == 9 * 9 * 4 * 4
    assert [p.grad.item() for p in model.parameters()] == [p.grad.item() for p in plain.parameters()]
    assert not any(_hook_counts(model))


@CHECKPOINTED
def test_checkpoint_sequential(reentrant: bool):
    """71, W: the segments of ``checkpoint_sequential``, with edits in two of them."""
    layers = [module for block in Net(None, blocks=3).blocks for module in block]
    model = nn.Sequential(*layers)

    def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> float:
        x = _one()
        with th.hooks(model) as hooks:
            hooks.forward("0", _times_3)
            hooks.forward("2", lambda module, args, output: output * 2)
            out = run(x)
        out.sum().backward()
        return x.grad.item()

    truth = gradient(model)
    assert truth == 8 * 3**8 * 2**4
    assert gradient(lambda x: checkpoint_sequential(model, 3, x, use_reentrant=reentrant)) == truth
    assert not any(_hook_counts(model))


@CHECKPOINTED
def test_block_called_twice_one_call_edited(reentrant: bool):
    """71, W: a shared block under two checkpoints; only what was edited is edited again."""
    model, x = Net(reentrant), _one()
    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        first = model(x)
    second = model(x)
    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", lambda module, args, output: output * 5)
        third = model(x)
    (first + second + third).sum().backward()
    assert x.grad.item() == 18 + 2 + 50


@CHECKPOINTED
def test_edit_put_on_between_forward_and_backward_does_not_apply(reentrant: bool):
    """71, W: the reverse fault: a recomputation is not edited where the forward was not, so 2.0 and never 18.0 or 6.0."""
    model, x = Net(reentrant), _one()
    out = model(x)
    with th.hooks(model) as hooks:
        handle = hooks.forward("blocks.0.0", _times_3)
        out.sum().backward()
        assert x.grad.item() == 2
        assert handle.fired == 0
        assert model(_one()).item() == 9


@CHECKPOINTED
def test_order_among_the_hooks_of_others_is_kept(reentrant: bool):
    """71, W: in the recomputation removed edits run where they stood among the user's own torch hooks."""

    def gradient(run_reentrant: bool | None, close_first: bool) -> float:
        model, x = Net(run_reentrant), _one()
        linear = model.blocks[0][0]
        own = [linear.register_forward_hook(lambda module, args, output: output + 1)]
        hooks = th.hooks(model)
        hooks.forward("blocks.0.0", lambda module, args, output: output * 3)
        own.append(linear.register_forward_hook(lambda module, args, output: output + 7))
        hooks.forward("blocks.0.0", lambda module, args, output: output * output)
        hooks.forward("blocks.0.0", lambda module, args, output: output + 0.5, prepend=True)
        out = model(x)
        if close_first:
            hooks.close()
        out.sum().backward()
        hooks.close()
        for handle in own:
            handle.remove()
        assert not any(_hook_counts(model))
        return x.grad.item()

    assert gradient(reentrant, close_first=True) == gradient(None, close_first=False)


@CHECKPOINTED
def test_hook_lost_to_somebody_else_is_an_error_and_never_a_wrong_gradient(reentrant: bool):
    """71, P: clearing the hook tables by hand between forward and backward is told, not passed over."""
    model, x = Net(reentrant), _one()
    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        out = model(x)
        model.blocks[0][0]._forward_hooks.clear()
        with pytest.raises(th.TenterhookError, match="taken off by somebody else"):
            out.sum().backward()


@CHECKPOINTED
def test_edit_in_another_thread_than_the_recomputation(reentrant: bool):
    """71, W: backward runs in a thread of its own, and a forward of this thread meanwhile is not edited."""
    import threading

    model, x = Net(reentrant), _one()
    inside, go_on = threading.Event(), threading.Event()
    main = threading.get_ident()

    def wait(module: nn.Module, args: Any) -> None:
        if threading.get_ident() != main:
            inside.set()
            go_on.wait(20)

    own = model.blocks[0][0].register_forward_pre_hook(wait)
    with th.hooks(model) as hooks:
        hooks.forward("blocks.0.0", _times_3)
        out = model(x)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    assert inside.wait(20)
    assert model(_one()).item() == 1
    go_on.set()
    thread.join()
    own.remove()
    assert x.grad.item() == RIGHT
    assert not any(_hook_counts(model))
