"""Which files may meet a framework: finer than the contracts in pyproject.toml can say it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenterhook

PACKAGE = Path(tenterhook.__path__[0])
ALLOWED = {
    "torch": re.compile(r"backends/(_torch_\w+|torch)\.py"),
    "mindspore": re.compile(r"(backends/(_mindspore_\w+|mindspore)|mindspore)\.py"),
}


def imported(source: str) -> Iterator[str]:
    """Top-level packages that a file imports, wherever in it: by statement or by a literal name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module.partition(".")[0]


@pytest.mark.parametrize("framework", ALLOWED)
def test_only_its_backend_imports_a_framework(framework: str) -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if framework in imported(path.read_text("utf-8"))
    }
    assert {path for path in importers if not ALLOWED[framework].fullmatch(path)} == set()


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "def f():\n    import torch.nn\n    from mindspore import nn\n    importlib.import_module('jax.numpy')\n"
    assert set(imported(source)) == {"torch", "mindspore", "jax"}
