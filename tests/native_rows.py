"""The rows of the same work, written by the native path and by the Python code, and modules to work with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.native import NATIVE

NATIVE_ONLY = [
    pytest.mark.skipif(NATIVE is None, reason="the native path is not built, or TENTERHOOK_CALLS=python"),
    pytest.mark.filterwarnings(
        "ignore:None of the inputs have requires_grad=True:UserWarning", "ignore:torch.utils.checkpoint:UserWarning"
    ),
]

Rows = tuple[list[dict[str, Any]], list[dict[str, Any]], str]


def _rows(rec: th.Recorder) -> Rows:
    calls = rec.table("calls").drop_columns(["start_ns", "duration_ns"]).to_pylist()
    return calls, [{k: repr(v) for k, v in row.items()} for row in rec.table("values").to_pylist()], str(rec.coverage)


def _native_calls(rec: th.Recorder) -> int:
    return rec._capture._engine.calls_recorded if rec._capture._engine is not None else 0


def _both(make: Callable[[], nn.Module], work: Callable[[nn.Module], Any], **options: Any) -> tuple[Rows, Rows, int]:
    torch.manual_seed(0)
    net = make()
    with th.record(net, **options) as rec:
        work(net)
    native, count = _rows(rec), _native_calls(rec)
    torch.manual_seed(0)
    net = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
        with th.record(net, **options) as rec:
            work(net)
    assert _native_calls(rec) == 0
    return native, _rows(rec), count


class _Gives(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = _Function(give)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.last(x)


class _Function(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: Tensor) -> Any:
        return self.give(x)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Tanh())


def _attributes(net: nn.Module) -> list[list[str]]:
    return [list(vars(module)) for module in net.modules()]
