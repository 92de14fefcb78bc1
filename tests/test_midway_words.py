"""What is said of hooks that were put on while their module was running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th

MIDWAY = "put on in the middle of a call of its module, which was not called since"


class Inner(nn.Module):
    """Puts a hook on the whole model, from within."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.put_on: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.put_on is not None:
            self.put_on()
        return self.fc(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Inner(), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
@pytest.mark.parametrize("path", ["", "inner"])
def test_of_the_last_call(kind: str, path: str) -> None:
    model = Net()
    with th.hooks(model) as hooks:
        model.inner.put_on = lambda: getattr(hooks, kind)(path, lambda *_: None)
        model(torch.ones(1, 2)).sum().backward()
        (site,) = hooks.sites
        assert (site.fired, hooks.why_not_fired(site)) == (0, MIDWAY)
        assert MIDWAY in " ".join(str(hooks).split())
        assert "never called" not in str(hooks)


def test_the_next_call_is_seen() -> None:
    model = Net()
    with th.hooks(model) as hooks:
        model.inner.put_on = lambda: hooks.forward("inner", lambda *_: None)
        model(torch.ones(1, 2))
        model.inner.put_on = None
        model(torch.ones(1, 2))
        (site,) = hooks.sites
        assert (site.fired, hooks.why_not_fired(site)) == (1, "")


def test_what_did_not_run_then_was_never_called() -> None:
    model = Net()
    with th.hooks(model) as hooks:
        model.inner.put_on = lambda: hooks.forward("", lambda *_: None)
        hooks.forward("inner.fc", lambda *_: None)
        hooks.forward("inner", lambda *_: None)
        assert [hooks.why_not_fired(site) for site in hooks.sites] == ["never called"] * 2
