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


TORCHS = """
test_forward_hooks test_forward_pre_hooks test_full_backward_hooks test_full_backward_pre_hooks test_mixed_hooks
test_kwarg_hooks test_remove_kwarg_hooks test_always_called_forward_hooks test_bw_hook_warning_for_non_tensor_or_tuple
test_load_state_dict_pre_hook test_no_extra_ref_to_module test_pickled_hook test_load_state_dict_module_pre_hook
test_load_state_dict_post_hook test_load_state_dict_post_hook_backward_compatibility test_module_global_hooks
test_module_global_hook_invalid_outputs test_module_backward_global_hook_writeable
test_module_global_forward_preforward_hook_writeable test_module_forward_preforward_hook_removable
test_module_forward_forward_hook_removable test_global_and_local_hooks_order test_hooks test_hook_cpp
test_backward_hooks_interaction test_hook_invalid_outputs test_hook_requires_grad test_hook_no_requires_grad
test_hook_last_arg_requires_grad test_hook_extra_input test_hook_inplace test_hook_non_full_warning
test_hook_backward_size test_hook_backward_writeable test_hook_forward_preforward_writable test_hook_buffer_registration
test_hook_submodule_registration test_hook_parameter_registration test_post_accumulate_grad_hook_gets_cleaned_up
test_post_accumulate_grad_hook_ordering test_hook_with_no_name test_prehook_ordering
test_retains_grad_can_always_observe_tensor_prehook test_accumulate_grad_posthooks_can_observe_tensor_prehook
test_accumulate_grad_posthooks_should_not_execute test_hook_edge_case_when_called_with_grad test_hooks_cpp test_hook_none
test_retain_grad test_retain_grad_cycle test_grad_fn_prehooks test_grad_fn_prehooks_multiple_outputs
test_grad_fn_prehooks_remove_hooks test_tensor_hooks_inplace test_retains_grad_inplace test_hook_closure_cycle
test_multi_grad_all_hooks test_multi_grad_any_hooks test_full_backward_hook_double_backward
test_saved_variable_packing_unpacking_saved_original_with_hooks test_pack_hook_with_inplace_modification_should_fail
test_default_saved_tensors_hooks test_disabling_saved_tensor_hooks test_spectral_norm
""".split()
SECTIONS = {"Promises": 22, "Bad input": 10, "What PyTorch holds its hooks to": 50}


def _section(title: str) -> list[str]:
    """Return the rows of one of the tables at the end of the page."""
    text = _docs().partition(f"### {title}\n")[2].partition("\n### ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]  # the first is the head


@pytest.mark.parametrize("title", SECTIONS)
def test_each_promise_has_a_row_that_names_a_test(title: str) -> None:
    rows = _section(title)
    assert len(rows) >= SECTIONS[title]
    for row in rows:
        assert re.fullmatch(r"\| .+ \| `tests/[\w/]+\.py::\w+`(?:, `tests/[\w/]+\.py::\w+`)* \|", row), row


def test_each_of_torchs_tests_has_one_of_ours_that_runs_bare_and_in_sessions() -> None:
    rows = _section("What PyTorch holds its hooks to")
    assert set(TORCHS) <= {name for row in rows for name in re.findall(r"`(test_\w+)`", row.split(" | ")[0])}
    for file, name in {found for row in rows for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)}:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        (test,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert "session" in [argument.arg for argument in test.args.args], f"{file}::{name}"


def _rows_of(test: ast.FunctionDef, before: list[str]) -> list[str]:
    """Return the rows that a test is of: its docstring begins with them, or else the line above its section."""
    if named := _IN_DOCSTRING.match(ast.get_docstring(test) or ""):
        return re.findall(r"\d\d", named[1])
    section = next((line for line in reversed(before) if line.startswith("# ---")), "")
    named = _IN_SECTION.match(section)
    return re.findall(r"\d\d", named[1]) if named else []


def _length(values: ast.expr, tree: ast.Module) -> int:
    """Return how many values something parametrised is written out with, or how many its constant has."""
    if isinstance(values, (ast.List, ast.Tuple)):
        return len(values.elts)
    if isinstance(values, ast.Dict):
        return len(values.keys)
    names = {node.id for node in ast.walk(values) if isinstance(node, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            if any(one.name in names for one in node.names):
                source = ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py")
                return _length(values, ast.parse(source.read_text("utf-8")))
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id in names for one in targets):
            return _length(node.value, tree)  # type: ignore[union-attr]
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
