"""What ``rec.coverage`` says: one line for each reason, and the reason that is so."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

import tenterhook as th


class Bad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad batch")


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), *more)


def test_without_gradients_one_line_says_so_of_all() -> None:
    net = layers()
    with th.record(net) as rec, torch.no_grad():
        net(torch.randn(3, 4))
    assert str(rec.coverage).splitlines()[1:] == ["  all 3: no gradient: grad mode off"]


@pytest.mark.parametrize("inside", [True, False])
def test_after_a_forward_that_raised(inside: bool) -> None:
    net = layers(Bad(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="bad batch"), th.record(net) as rec:
        if inside:
            with pytest.raises(ValueError, match="bad batch"):
                net(torch.randn(3, 4))
            raise ValueError("bad batch")
        net(torch.randn(3, 4)).sum().backward()
    assert str(rec.coverage).splitlines()[1:] == [
        "  (root), 0, 1, 2: no gradient: ValueError was raised before a backward pass",
        "  3: never called",
    ]


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt(), None], ids=repr)
def test_an_exception_that_was_caught_explains_no_gradient(error: BaseException | None) -> None:
    """Whoever catches it goes on, and need not have meant to differentiate: only what ends the session is said to have come before."""
    net = layers(Bad(), nn.Linear(4, 4))
    with contextlib.suppress(ValueError, KeyboardInterrupt), th.record(net) as rec:
        with pytest.raises(ValueError, match="bad batch"):
            net(torch.randn(3, 4))
        running = str(rec.coverage)
        if error is not None:
            raise error
    reason = (
        "no backward pass reached it" if error is None else f"{type(error).__name__} was raised before a backward pass"
    )
    assert f"  (root), 0, 1, 2: no gradient: {reason}" in str(rec.coverage).splitlines()
    assert "was raised" not in running


@pytest.mark.parametrize("code", [0, None, 3])
def test_the_end_of_a_program_is_no_exception(code: int | None) -> None:
    net = layers(nn.Linear(4, 4))
    with pytest.raises(SystemExit), th.record(net) as rec:
        net(torch.randn(3, 4))
        raise SystemExit(code)
    assert ("SystemExit was raised" in str(rec.coverage)) == bool(code)


def test_after_a_backward_pass_it_is_not_the_exception() -> None:
    net = layers(nn.Linear(4, 4))
    with th.record(net) as rec:
        net(torch.randn(3, 4)).sum().backward()
        with pytest.raises(RuntimeError):
            net(torch.randn(3, 5))
    assert rec.coverage.complete


def test_many_modules_are_counted() -> None:
    net = layers(*(nn.Identity() for _ in range(18)), Bad(), *(nn.Identity() for _ in range(9)))
    with pytest.raises(ValueError, match="bad batch"), th.record(net) as rec:
        net(torch.randn(3, 4))
    lines = str(rec.coverage).splitlines()
    assert [line.partition(": ")[0] for line in lines[1:]] == [
        "  (root), 0, 1, 2, 3, 4 and 16 more", "  21, 22, 23, 24, 25, 26 and 3 more",
    ]  # fmt: skip


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_attention_gives_one_reason_for_its_last_layer(gone: bool, backward: bool, training: bool) -> None:
    net = nn.MultiheadAttention(8, 2).train(training)
    with th.record(net) as rec:
        out = net(*[torch.randn(3, 2, 8)] * 3)[0]
        if backward:
            out.sum().backward()
        if gone:
            del net, out
            gc.collect()
    assert dict(rec.coverage.missing)["out_proj"] == "weights used without calling the module"


def test_of_a_model_that_is_gone_the_reasons_are_kept() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.items[0](x)

    model = Net()
    with th.record(model) as rec, torch.no_grad():
        model(torch.randn(3, 4))
        del model
        gc.collect()
    assert dict(rec.coverage.missing) == dict.fromkeys(["(root)", "items.0"], "no gradient: grad mode off")
