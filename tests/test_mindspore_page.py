from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "mindspore.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\b(test_\w+)(?!\w*\.py)\b`", PAGE.read_text(encoding="utf-8")))
    files = set(re.findall(r"\b(test_\w+\.py)\b", PAGE.read_text(encoding="utf-8")))
    defined = {
        name
        for folder in ("mindspore", "contract")
        for path in (TESTS / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) >= 20 and not named - defined
    assert all(list(TESTS.glob(f"*/{name}")) for name in files)
