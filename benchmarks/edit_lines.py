"""How many lines everyday tasks take with tenterhook, nnsight, TransformerLens and baukit; prints the table of docs/edit.md.

    python -m benchmarks.edit_lines

The tasks are the functions of `benchmarks/edit_tasks/`, written as short as each library lets them be. A line is a statement
of the function's body (a `with` and each statement in it, each assignment, the `return`), none longer than the formatter's 120
columns: the layout does not count, nor does what all share (imports, the network, its inputs). What is installed is run on
the same weights, and the results must agree; what is not is counted and named.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.edit_tasks.net import WIDTH, tokens

__all__ = ["LIBRARIES", "TASKS", "counts", "results", "table"]

FOLDER = Path(__file__).parent / "edit_tasks"
LIBRARIES = {
    "tenterhook": "tenterhook", "nnsight": "nnsight", "transformer_lens": "TransformerLens", "baukit": "baukit",
}  # fmt: skip
"""File -> the name in the table; ours first."""

TASKS = {
    "read_one": "read one module's output",
    "read_all": "read every block's output",
    "read_gradient": "read the gradient of an activation",
    "without_a_head": "leave out an attention head",
    "patch_a_position": "patch one position from a clean run",
    "mean_ablate": "ablate by the mean over other inputs",
    "scale_a_part": "scale one part of a tuple",
    "steer_one_step": "steer at one step of a generation",
    "scale_gradients": "change a gradient",
    "skip_a_block": "skip a block",
    "stop_early": "stop early and take what is there",
    "edit_and_read": "edit, and read what becomes of it",
}
"""Function -> what it does."""


def counts(library: str) -> dict[str, int]:
    """Count the statements of each task in a library's file, which is not run."""
    found = {}
    for node in ast.parse((FOLDER / f"{library}.py").read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in TASKS:
            found[node.name] = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
    return found


def results(library: str) -> dict[str, Any] | str:
    """Run each task with a library; or say which package is missing."""
    try:
        tasks = importlib.import_module(f"benchmarks.edit_tasks.{library}")
    except ImportError as error:
        return f"{LIBRARIES[library]} was not run: {error}"
    more: Mapping[str, tuple[torch.Tensor, ...]] = {
        "patch_a_position": (tokens(2),),
        "mean_ablate": (tokens(3, batch=5),),
        "steer_one_step": (torch.linspace(30, -30, WIDTH),),
    }
    found = {}
    for name in TASKS:
        task: Callable[..., Any] = getattr(tasks, name)
        found[name] = task(tasks.prepare(), tokens(1), *more.get(name, ()))
    return found


def agree(one: Any, other: Any) -> bool:
    """Whether two results are the same, up to the order in which sums are taken."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(agree, one, other))
    return one.shape == other.shape and torch.allclose(one.detach().double(), other.detach().double(), atol=1e-5)


def table() -> str:
    """Return the table of counts in Markdown."""
    by_library = [counts(library) for library in LIBRARIES]
    rows = [f"| task | {' | '.join(LIBRARIES.values())} |", "|---|" + "---|" * len(LIBRARIES)]
    for number, (name, text) in enumerate(TASKS.items(), start=1):
        rows.append(f"| {number} {text} | " + " | ".join(str(found[name]) for found in by_library) + " |")
    return "\n".join(rows)


def main() -> int:
    ours, *others = LIBRARIES
    expected = results(ours)
    assert isinstance(expected, dict)
    wrong = []
    for library in others:
        found = results(library)
        if isinstance(found, str):
            print(found, file=sys.stderr)
            continue
        wrong += [f"{LIBRARIES[library]}: {name}" for name in TASKS if not agree(expected[name], found[name])]
    print(table())
    print("\n".join(f"results differ: {one}" for one in wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
