"""What is printed around a recorded script."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from tenterhook.reporters import summary as reporter
from tenterhook.reporters.summary import print_header, print_summary, print_trouble
from tenterhook.script_recorder import FullStep, RecordSummary

TO = Path("runs/train-1129-143000.thk")
WHOLE = RecordSummary(
    path=Path("/somewhere/else.thk"),
    modules_selected=148,
    modules_fired=145,
    missing=[
        ("head.aux", "never called"),
        ("lm.0", "compiled before hooks were set"),
        ("lm.1", "compiled before hooks were set"),
    ],
    calls=3552,
    values=7104,
    steps=12,
    steps_recorded=12,
    fullest=FullStep(2, 0, "Net"),
    hook_seconds=13.46,
    wall_seconds=761.2,
    size_bytes=31_400_000,
    nothing_called=False,
)
SUMMARIES = {
    "whole": WHOLE,
    "all-covered": replace(WHOLE, modules_fired=148, missing=[]),
    "many-missing": replace(WHOLE, modules_fired=48, missing=[(f"layer.{n}", "never called") for n in range(100)]),
    "sampled": replace(WHOLE, steps=1200),
    "crowded": replace(WHOLE, steps=1, steps_recorded=1, fullest=FullStep(120, 0, "Net")),
    "stopped": replace(WHOLE, error="ValueError: bad batch"),
    "partial": replace(WHOLE, partial="writing stopped: No space left on device; 1,204 rows were lost"),
    "nothing-called": RecordSummary(path=TO, wall_seconds=0.4),
    "nothing-matched": RecordSummary(
        path=TO,
        nothing_called=False,
        missing=[("featuers.*", "matches nothing; nearest: 'features.*' (3 modules)")],
        wall_seconds=2.0,
    ),
    "nothing-fired": replace(
        WHOLE, modules_selected=1, modules_fired=0, missing=[("aux", "never called")], calls=0, values=0
    ),
}


def console(width: int = 80) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width, highlight=False), stream


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(snapshot: SnapshotAssertion, name: str, width: int) -> None:
    terminal, stream = console(width)
    print_summary(terminal, SUMMARIES[name], TO)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert text == snapshot


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_quiet_are_told_of_trouble_only(snapshot: SnapshotAssertion, name: str) -> None:
    terminal, stream = console()
    print_trouble(terminal, SUMMARIES[name], TO)
    assert bool(stream.getvalue()) == (
        name not in ("whole", "all-covered", "many-missing", "sampled", "crowded", "stopped")
    )
    assert stream.getvalue() == snapshot


def test_paths_are_never_broken() -> None:
    terminal, stream = console(40)
    long = Path("runs") / ("a-very-long-name-of-a-training-run" * 3 + ".thk")
    print_summary(terminal, WHOLE, long)
    assert str(long) in stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_header(snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(reporter, "version", lambda name: "2.13.0")
    monkeypatch.setattr(reporter, "__version__", "0.1.0")
    terminal, stream = console(width)
    print_header(terminal, TO, select=None, every=1, stats="basic")
    print_header(terminal, TO, select=["encoder.**", "!head"], every=50, stats=None)
    print_header(terminal, TO, select=None, every={"**": 100, "head.**": 1}, stats="basic")
    assert stream.getvalue() == snapshot


@pytest.mark.parametrize(
    ("every", "steps", "words"),
    [
        (1, None, "every step"),
        (1, "500:700:50", "steps 500:700:50"),
        ({"**": 1}, "0:10,500", "steps 0:10,500"),
        (10, "500:700:50", "every 10 steps, of steps 500:700:50 only"),
        ({"**": 100, "head.**": 1}, "0:900", "every 100 steps, head.** every step, of steps 0:900 only"),
    ],
)
def test_the_header_says_which_steps(every: int | dict[str, int], steps: str | None, words: str) -> None:
    terminal, stream = console(200)
    print_header(terminal, TO, select=None, every=every, stats="basic", steps=steps)
    assert f" | all modules | {words} | stats basic\n" in stream.getvalue()
