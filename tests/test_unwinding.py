"""Exceptions that go past all hooks: calls that never ended have nothing inside of them afterwards."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import tenterhook as th


class _Stop(BaseException):
    pass


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        self.broken: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enc(x)
        if self.broken == "forward":
            raise _Stop
        return x + 1


@pytest.mark.parametrize("broken", ["forward", "hook"])
@pytest.mark.parametrize("next_call", ["enc", "enc.0", "enc.1.0", ""])
def test_what_is_called_after_an_interrupt_stands_by_itself(broken: str, next_call: str) -> None:
    net = _Deep()

    def interrupts(module: nn.Module, args: object, output: object) -> None:
        raise _Stop

    with th.record(net) as rec:
        handle = net.enc[1][1].register_forward_hook(interrupts) if broken == "hook" else None
        net.broken = broken
        with pytest.raises(_Stop):
            net(torch.ones(1, 2))
        if handle is not None:
            handle.remove()
        net.broken = None
        time.sleep(0.001)  # an exception that goes through frames takes its time, too
        part = net.get_submodule(next_call)
        part(torch.ones(1, 2))
    calls = [call for call in rec.order() if call.path == next_call]
    assert (calls[-1].depth, calls[-1].parent, calls[-1].error) == (0, None, None)
    assert next(call.error for call in rec.order() if call.path == "") == "did not end"


def test_a_long_forward_is_no_interrupt() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                time.sleep(0.001)
                x = part(x)
            return x

    net = Slow()
    with th.record(net) as rec:
        net(torch.ones(1, 2))
    depths = {call.path: call.depth for call in rec.order()}
    assert depths == {"": 0} | {f"parts.{n}": 1 for n in range(3)} | {f"parts.{n}.0": 2 for n in range(3)}
    assert all(call.error is None for call in rec.order())


def test_functional_calls_after_an_interrupt_are_the_users_own() -> None:
    net = _Deep()
    with th.record(net, ops=True) as rec:
        net.broken = "forward"
        with pytest.raises(_Stop):
            net(torch.ones(1, 2))
        net.broken = None
        time.sleep(0.001)
        torch.ones(3).exp().sum()
        net(torch.ones(1, 2))
        torch.ones(3).sin()
    ops = [call.path for call in rec.order() if call.type == "op"]
    assert ops == ["(root)/add"]
    assert torch._C._len_torch_function_stack() == 0


def test_functional_calls_in_a_slow_forward_are_seen() -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                time.sleep(0.001)
                x = torch.relu(x)
            return x

    net = Slow()
    with th.record(net, ops=True) as rec:
        net(torch.ones(2))
    assert [call.call for call in rec["(root)/relu"].calls] == [0, 1, 2]
