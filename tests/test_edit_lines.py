"""The comparison of everyday tasks with other libraries: what docs/edit.md says of it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks import edit_lines  # noqa: E402 - needs torch
from benchmarks.edit_tasks import tenterhook as ours  # noqa: E402
from benchmarks.edit_tasks.net import build, tokens  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "edit.md"
READING = ("read_one", "read_all", "read_gradient", "scale_gradients", "stop_early")


def test_no_task_takes_more_lines_than_in_the_shortest_of_the_others() -> None:
    mine, *others = (edit_lines.counts(library) for library in edit_lines.LIBRARIES)
    assert all(list(found) == list(edit_lines.TASKS) for found in (mine, *others))
    assert {name: mine[name] for name in mine if mine[name] > min(other[name] for other in others)} == {}


def test_the_page_shows_the_counts_and_our_programs() -> None:
    page = PAGE.read_text("utf-8")
    assert edit_lines.table() in page
    source = Path(ours.__file__).read_text("utf-8")
    for name in edit_lines.TASKS:
        _, _, body = source.partition(f"def {name}(")
        body = body.partition("\n\n\n")[0].partition(":\n")[2].replace("\n    ", "\n").strip()
        assert body.replace("return ", "") in page.replace("return ", ""), name


def test_each_task_does_something_and_leaves_nothing_behind() -> None:
    found = edit_lines.results("tenterhook")
    assert isinstance(found, dict)
    net, x = build(), tokens(1)
    plain = net(x)
    for name in edit_lines.TASKS:
        if name not in READING:
            reference = net.generate(x, 4) if name == "steer_one_step" else plain
            if name == "edit_and_read":
                reference = edit_lines.results("tenterhook")["read_all"][2]  # type: ignore[index]
            assert not edit_lines.agree(found[name], reference), name
    assert edit_lines.agree(found["read_all"][1], found["read_one"])
    assert edit_lines.agree(found["stop_early"], found["read_one"])
    net(x).sum().backward()
    assert not edit_lines.agree(found["scale_gradients"], net.embed.weight.grad)
