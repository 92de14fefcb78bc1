"""Runs the code of the Chinese page, in one framework, and compares what it prints with what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

__all__ = ["run_page"]

PAGE = Path(__file__).parents[1] / "docs" / "zh" / "README.md"
_BLOCK = re.compile(r"^```(python|text)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(framework: str) -> int:
    """Run all blocks for both frameworks or for this one; returns how many outputs were compared."""
    names: dict[str, object] = {"__name__": "page"}
    printed, compared = "", 0
    for language, only, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if only not in ("", framework):
            continue
        if language == "text":
            assert printed == text
            compared += 1
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, str(PAGE), "exec"), names)
        printed = out.getvalue()
    return compared
