"""The table in the docs has every kind of fault, and names tests that exist; every kind has three cases at least."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = (
    "04 05 06 07 18 19 37 38 39 41 45 53 60  02 03 09 10 11 30 42 43 55 64 71  01 08 29 40 44 47 59 62 63 67 76"
    "  21 22 23 24 25 26 27 52 65 73  32 33 34 35 36 56 58 69  13 14 15 16 17 48 50"
).split()
_NUMBERS = r"(\d\d(?:(?:, | and | with )\d\d)*)\b"
_IN_DOCSTRING = re.compile(rf"(?:Rows? )?{_NUMBERS}")
_IN_SECTION = re.compile(rf"# -{{3,}} (?:rows? )?{_NUMBERS}")


def _docs() -> str:
    return (ROOT / "docs" / "semantics.md").read_text("utf-8")


def test_the_table_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", _docs())
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_each_kind_has_one_row_and_a_test_in_it() -> None:
    rows = re.findall(r"^\| (\d\d) \|.*\| (`tests/.*`) \|$", _docs(), re.MULTILINE)
    assert sorted(number for number, _ in rows) == sorted(ROWS)


def _rows_of(test: ast.FunctionDef, before: list[str]) -> list[str]:
    """Return the rows that a test is of: its docstring begins with them, or else the line above its section."""
    if named := _IN_DOCSTRING.match(ast.get_docstring(test) or ""):
        return re.findall(r"\d\d", named[1])
    section = next((line for line in reversed(before) if line.startswith("# ---")), "")
    named = _IN_SECTION.match(section)
    return re.findall(r"\d\d", named[1]) if named else []


def _length(values: ast.expr, tree: ast.Module) -> int:
    """Return how many values something parametrised is written out with, or how many its constant of the file is."""
    if isinstance(values, (ast.List, ast.Tuple)):
        return len(values.elts)
    if isinstance(values, ast.Dict):
        return len(values.keys)
    names = {node.id for node in ast.walk(values) if isinstance(node, ast.Name)}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(one, ast.Name) and one.id in names for one in targets) and node.value is not None:
            return _length(node.value, tree)
    return 1


def _cases(test: ast.FunctionDef, tree: ast.Module) -> int:
    cases = 1
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == "parametrize":
            cases *= _length(mark.args[1], tree)
    return cases


def _counted(file: Path) -> Iterator[tuple[str, int]]:
    source = file.read_text("utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for row in _rows_of(node, lines[: node.lineno]):
                yield row, _cases(node, tree)


@pytest.fixture(scope="module")
def cases() -> Counter[str]:
    counts: Counter[str] = Counter()
    for file in (*(ROOT / "tests" / "semantics").glob("test_*.py"), ROOT / "tests" / "test_ops.py"):
        for row, number in _counted(file):
            counts[row] += number
    return counts


@pytest.mark.parametrize("row", ROWS)
def test_each_kind_has_three_cases(row: str, cases: Counter[str]) -> None:
    assert cases[row] >= 3


def test_tests_name_rows_that_there_are(cases: Counter[str]) -> None:
    assert set(cases) <= set(ROWS)
