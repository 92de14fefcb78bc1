"""What a session saw, and the reasons it gives for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tenterhook as th
from tenterhook.hookset import HookSet

NOT_CALLED = "never called"
ONLY_INSIDE = "never called itself, only modules inside it: through .forward, another method, or a slice of it"
BY_GRADIENT = "never called, though its weights got a gradient: used directly, by .forward, or before the session"


def ignore(*args: Any) -> None:
    """A callback that does nothing."""


def forward_paths(rec: th.Recorder) -> list[str]:
    return [call.path for call in rec.order() if call.phase == "forward"]


def missing(rec: th.Recorder) -> dict[str, str]:
    return dict(rec.coverage.missing)


def why(hooks: HookSet) -> dict[str, str]:
    """Path -> the reason that print(hooks) shows, for hooks that have not fired; each is checked to be printed."""
    reasons = {site.path or "(root)": hooks.why_not_fired(site) for site in hooks.sites if not site.fired}
    for path, reason in reasons.items():
        assert any(line.split()[0] == path and line.endswith(reason) for line in str(hooks).splitlines()[2:])
    return reasons


def seen_and_told(model: nn.Module, run: Callable[[], Any]) -> tuple[list[str], dict[str, str]]:
    """What a recording saw, and of what was never called the reasons; print(hooks) has to say the same."""
    with th.record(model) as rec:
        run()
    told = {path: reason for path, reason in rec.coverage.missing if path not in rec.coverage.fired}
    with th.hooks(model) as hooks:
        hooks.forward("**", ignore)
        run()
        assert why(hooks) == told
    assert why(hooks) == told
    return forward_paths(rec), told


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)
