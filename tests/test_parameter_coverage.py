"""A parameter whose gradient was asked for and never came is told."""

from __future__ import annotations

import torch
from torch import nn

import tenterhook as th


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.detached = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x)) + self.detached(x).detach()


def test_parameters_without_a_gradient_are_told() -> None:
    net = _Net()
    with th.record(net, kinds=["param_grad"]) as rec:
        net(torch.ones(1, 2)).sum().backward()
    assert dict(rec.coverage.missing) == {
        "detached": "no gradient of weight, bias: no backward pass reached it",
        "frozen": "no gradient of weight, bias: requires_grad=False",
    }


def test_one_parameter_of_two_is_told_by_name() -> None:
    net = _Net()
    net.used.bias.requires_grad_(False)
    with th.record(net, "used", kinds=["param_grad"]) as rec:
        net(torch.ones(1, 2)).sum().backward()
    assert dict(rec.coverage.missing) == {"used": "no gradient of bias: requires_grad=False"}
    with th.record(net, "used", kinds=["output"]) as rec:  # not asked for, not told
        net(torch.ones(1, 2)).sum().backward()
    assert rec.coverage.missing == []
