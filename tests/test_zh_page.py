from __future__ import annotations

from tests.zh_page import run_page


def test_the_chinese_page_prints_what_it_says_in_torch() -> None:
    assert run_page("torch") == 4
