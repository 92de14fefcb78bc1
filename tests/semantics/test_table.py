"""The table in the docs names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "semantics.md").read_text("utf-8"))
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_each_kind_has_one_row() -> None:
    numbers = re.findall(r"^\| (\d\d) \|", (ROOT / "docs" / "semantics.md").read_text("utf-8"), re.MULTILINE)
    assert numbers
    assert len(numbers) == len(set(numbers))
