from __future__ import annotations

import tenterhook.mindspore
from tests.mindspore.loading import assert_untouched
from tests.zh_page import run_page


def test_the_chinese_page_prints_what_it_says_in_mindspore() -> None:
    tenterhook.mindspore.install()  # as its import does in a process that has not uninstalled it yet
    assert run_page("mindspore") == 5
    assert_untouched()
