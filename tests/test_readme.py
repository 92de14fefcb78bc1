"""The README's session prints what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_session_in_the_readme_is_real() -> None:
    pytest.importorskip("torch")
    text = README.read_text(encoding="utf-8")
    session = text.split("```pycon\n")[1].split("```")[0]
    test = doctest.DocTestParser().get_doctest(session, {}, "README.md", str(README), 0)
    assert len(test.examples) == 6
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0


def test_pictures_and_pages_that_the_readme_links_to_exist() -> None:
    text = README.read_text(encoding="utf-8")
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert links
    assert not [link for link in links if not (README.parent / link).exists()]
