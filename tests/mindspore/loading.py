"""Nets to load weights into, and MindSpore's loader as it was before tenterhook met it."""

# MindSpore declares the attributes of its cells too loosely for the type checker.
# pyright: reportOptionalCall=false

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import serialization

LOADER = inspect.unwrap(serialization.load_param_into_net)
CODE_AT_FIRST = LOADER.__code__
SOURCE_AT_FIRST = inspect.findsource(LOADER)
WALK_AT_FIRST = nn.Cell.__dict__["parameters_and_names"]
GLOBALS_AT_FIRST = set(LOADER.__globals__)
CELL_NAMES_AT_FIRST = set(vars(nn.Cell))

METHOD = "register_load_param_into_net_post_hook"


def assert_untouched() -> None:
    assert LOADER.__code__ is CODE_AT_FIRST
    assert nn.Cell.__dict__["parameters_and_names"] is WALK_AT_FIRST
    assert set(LOADER.__globals__) == GLOBALS_AT_FIRST
    assert set(vars(nn.Cell)) == CELL_NAMES_AT_FIRST


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


class Head(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(2, 3)
        self.out = nn.Dense(3, 1)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.out(self.fc(x))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Dense(4, 2)
        self.head = Head()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.head(self.body(x))


ALL_KEYS = ["body.weight", "body.bias", "head.fc.weight", "head.fc.bias", "head.out.weight", "head.out.bias"]


def weights_of(net: nn.Cell, prefix: str = "") -> dict[str, ms.Parameter]:
    return {
        prefix + name: ms.Parameter(ms.Tensor(np.full(p.shape, 7, np.float32)), name=prefix + name)
        for name, p in net.parameters_and_names()
    }


class Seen:
    """A hook that notes the lists as they were, and keeps the lists themselves."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Cell, list[str], list[str]]] = []
        self.lists: list[tuple[list[str], list[str]]] = []

    def __call__(self, cell: nn.Cell, keys: Any) -> None:
        self.calls.append((cell, list(keys.missing_keys), list(keys.unexpected_keys)))
        self.lists.append((keys.missing_keys, keys.unexpected_keys))
