"""What ``tenterhook show`` prints of some of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import tenterhook
from tests.cli.recordings import write_ranks


@pytest.mark.parametrize("asked", [(), ("--rank", "1"), ("--ranks", "1"), ("--ranks", "1,2")])
def test_the_rank_of_the_first_value_that_is_not_finite_is_named(tmp_path: Path, asked: tuple[str, ...]) -> None:
    path = write_ranks(tmp_path / "a.thk", {0: {3: {}}, 1: {3: {"nan_count": 1}}, 2: {3: {}}})
    out = tenterhook("show", str(path), *asked, width=400).out
    assert " first ! fc:output#0@3 of rank 1 has 1 nan; " in out
    assert f" next    tenterhook show {path} --rank 1 --step 3 --site fc\n" in out
    rows = json.loads(tenterhook("show", str(path), "--rank", "1", "--step", "3", "--site", "fc", "--json").out)[
        "data"
    ]["rows"]
    assert rows[0]["values"][0]["statistics"]["nan_count"] == 1
    assert json.loads(tenterhook("show", str(path), "--json").out)["data"]["overview"]["first_nonfinite"]["rank"] == 1


@pytest.mark.parametrize("asked", ["1:0", "0,3:3"])
def test_no_rank_at_all_is_refused(tmp_path: Path, asked: str) -> None:
    path = write_ranks(tmp_path / "a.thk", {0: {0: {}}, 1: {0: {}}})
    found = tenterhook("show", str(path), "--ranks", asked)
    assert (found.code, found.out) == (2, "")
    assert f"there is no rank in '{asked[-3:]}'" in found.err and "0,3 or 0:8" in found.err


def test_a_rank_that_is_not_read_is_not_shown(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "a.thk", {0: {0: {}}, 1: {0: {}}})
    found = tenterhook("show", str(path), "--ranks", "1", "--rank", "0")
    assert found.code == 2 and "--rank 0 is not among --ranks" in found.err
    assert tenterhook("show", str(path), "--ranks", "1,0", "--rank", "0").code == 0
