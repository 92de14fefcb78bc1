"""Runs the command line inside the test's own process."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tenterhook.cli import main

__all__ = ["Result", "tenterhook"]


@dataclass(frozen=True)
class Result:
    """What a command printed, and the exit code."""

    out: str
    err: str
    code: int


def tenterhook(*args: str, width: int = 80) -> Result:
    """Run ``tenterhook ARGS`` in a terminal of some width."""
    out, err = io.StringIO(), io.StringIO()
    with (
        _columns(width),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        main(args)
    assert isinstance(exit_.value.code, int)
    return Result(out.getvalue(), err.getvalue(), exit_.value.code)


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({name: text for name, text in before.items() if text is not None})
