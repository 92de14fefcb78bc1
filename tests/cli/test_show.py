"""What ``tenterhook show`` prints."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from tenterhook.cli import run_show
from tests.cli import recordings
from tests.cli.commands import Result, tenterhook
from tests.cli.recordings import (
    write_empty,
    write_first_bad,
    write_kinds,
    write_measured,
    write_named,
    write_net,
    write_ranks,
    write_steps,
)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_net(Path("runs") / "train.thk")


def show(*args: str, width: int = 80) -> Result:
    return tenterhook("show", *args, width=width)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("form", ["tree", "order", "table"])
def test_forms(net: Path, snapshot: SnapshotAssertion, form: str, width: int) -> None:
    result = show("@0", "--as", form, width=width)
    assert result.code == 0
    assert result.err == ""
    assert max(map(len, result.out.splitlines())) <= width
    assert result.out == snapshot


@pytest.mark.parametrize("width", [80, 120])
def test_a_step_with_values_that_are_not_finite(net: Path, snapshot: SnapshotAssertion, width: int) -> None:
    assert show("@0", "--step", "1", width=width).out == snapshot


def test_sites_over_all_steps(net: Path, snapshot: SnapshotAssertion) -> None:
    assert show("@0", "--site", "features.*", "--site", "head:grad_output").out == snapshot


def test_a_site_with_a_kind_shows_that_kind_only(net: Path) -> None:
    rows = json.loads(show("@0", "--site", "features.0:grad_output", "--json").out)["data"]["rows"]
    assert {(row["path"], value["kind"]) for row in rows for value in row["values"]} == {("features.0", "grad_output")}
    assert [row["step"] for row in rows] == [0, 1]


def test_a_site_by_type(net: Path) -> None:
    rows = json.loads(show("@0", "--site", "type:LSTM", "--json").out)["data"]["rows"]
    assert {row["path"] for row in rows} == {"rnn"}


@pytest.mark.parametrize(
    ("site", "rows"),
    [
        ("features.0:output#0@1", [("features.0", 0, 1, ["output"])]),
        ("Net/features.0:output@1", [("features.0", 0, 1, ["output"])]),
        ("cell#4@0", [("cell", 4, 0, ["output"]), ("cell", 4, 0, ["grad_output"])]),
        ("Net/(root)@1", [("", 0, 1, ["output"]), ("", 0, 1, ["grad_output"])]),
        ("Net:grad_output@0", [("", 0, 0, ["grad_output"])]),
        ("(root):output", [("", 0, 0, ["output"]), ("", 0, 1, ["output"])]),
        ("rnn:output[1]@0", [("rnn", 0, 0, ["output", "output"])]),
        ("rnn:output[1][0]#0@0", [("rnn", 0, 0, ["output"])]),
        ("features.*:output@1", [("features.0", 0, 1, ["output"]), ("features.1", 0, 1, ["output"])]),
        ("Net/type:LSTM@0", [("rnn", 0, 0, ["output"] * 3)]),
    ],
)
def test_addresses_are_taken_as_they_are_printed(net: Path, site: str, rows: list) -> None:
    found = json.loads(show("@0", "--site", site, "--json").out)["data"]["rows"]
    assert [
        (row["path"], row["call"], row["step"], [value["kind"] for value in row["values"]]) for row in found
    ] == rows


def test_every_printed_site_is_taken(net: Path) -> None:
    lines = show("@0", "--as", "table", "--step", "1", width=200).out.splitlines()
    sites = [line.split()[0] for line in lines[lines.index("step 1, every value") + 2 :] if line.strip()][:-1]
    assert len(sites) == 24
    for site in sites:
        assert show("@0", "--step", "1", "--site", site, "--json").code == 0, site


@pytest.mark.parametrize("model", ["Net", "net"])
def test_odd_names_are_printed_so_that_they_are_taken(tmp_path: Path, model: str) -> None:
    names = ["a b/c:d#e@f[0]", "日本", "x,y", "!z", "re:w", 'quo"te', "features"]
    path = write_named(tmp_path / "a.thk", names, model=model)
    lines = show(str(path), "--as", "table", width=200).out.splitlines()
    sites = [re.split(r"  +", line)[0] for line in lines[lines.index("step 0, every value") + 2 :]]
    assert len(sites) == 2 * len(names)
    for site, name in zip(sites, [*names, *names], strict=True):
        for text in (site, f"{site}#0@0"):
            rows = json.loads(show(str(path), "--site", text, "--json").out)["data"]["rows"]
            assert {row["path"] for row in rows} == {name}, text


@pytest.mark.parametrize("site", ["cell#9", "features.0:output@7", "head:input", "rnn:output[2]"])
def test_an_address_of_which_nothing_is_recorded(net: Path, site: str) -> None:
    result = show("@0", "--site", site)
    assert (result.code, result.out) == (4, "")
    assert result.err.startswith(f"tenterhook: nothing is recorded of '{site}'")


def test_the_nearest_names_are_listed_once(tmp_path: Path) -> None:
    path = write_net(tmp_path / "a.thk", models=("Net", "Net-2"))
    assert show(str(path), "--site", "featuers.0").err.count("'features.0'") == 1


def test_the_nearest_recordings_are_listed_once(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.parent)
    assert show("trian.thk").err.count(net.name) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_every_kind_has_its_name(tmp_path: Path, snapshot: SnapshotAssertion, width: int) -> None:
    out = show(str(write_kinds(tmp_path / "a.thk")), width=width).out
    assert max(map(len, out.splitlines())) <= width
    assert out == snapshot


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("output", None, "its input was not recorded, so it may have come in with that: --kinds input,output tells"),
        ("output", {}, "its input was finite, so it arose in this module or in its parameters"),
        ("output", {"nan_count": None}, "not all of its input has statistics, so it may have come in with that"),
        ("input", None, "nothing before it was not finite: it came from outside, or out of a function between modules"),
        ("grad_output", None, "what was recorded before it is finite"),
        ("grad_input", None, "its grad_output was not recorded"),
        ("param", None, "the parameter itself is not finite"),
    ],
)
def test_where_the_first_value_that_is_not_finite_came_from(
    tmp_path: Path, kind: str, given: dict | None, words: str
) -> None:
    path = write_first_bad(tmp_path / "a.thk", kind, given)
    out = show(str(path), width=400).out
    assert words in out
    assert f" next    tenterhook show {path} --step 3 --site fc\n" in out


def test_of_one_rank_none_is_named(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "a.thk", {0: {3: {"nan_count": 1}}})
    out = show(str(path), width=400).out
    assert "of rank" not in out
    assert "--rank" not in out


_UNKNOWN = {"nan_count": None, "posinf_count": None, "neginf_count": None}


@pytest.mark.parametrize(
    ("measured", "words", "unmeasured", "nonfinite"),
    [
        ([{}, {}], "2 values, all finite ", 0, 0),
        ([{}, {**_UNKNOWN, "dtype": "none"}], "2 values, all finite ", 0, 0),
        ([_UNKNOWN, _UNKNOWN], "2 values, none of them measured (no statistics) ", 2, None),
        ([_UNKNOWN, {**_UNKNOWN, "dtype": "none"}], "2 values, none of them measured (no statistics) ", 1, None),
        ([{}, _UNKNOWN], "2 values, 1 not measured (no statistics), the others finite ", 1, 0),
        ([_UNKNOWN, {"nan_count": 1}], "2 values, 1 of them not finite, 1 not measured (no statistics) ", 1, 1),
    ],
)
def test_finite_is_what_was_measured(
    tmp_path: Path, measured: list[dict], words: str, unmeasured: int, nonfinite: int | None
) -> None:
    path = write_measured(tmp_path / "a.thk", measured)
    assert words in show(str(path), width=200).out.splitlines()[0]
    found = json.loads(show(str(path), "--json").out)["data"]["overview"]
    assert (found["values"], found["unmeasured"], found["nonfinite"]) == (2, unmeasured, nonfinite)


def test_how_the_run_ended(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path = write_net(
        tmp_path / "a.thk",
        bad=False,
        error="ValueError: bad batch",
        resumed=[12],
        steps=200,
    )
    found = show(str(path))
    assert found.out.partition("\n\n")[0] == snapshot
    assert json.loads(show(str(path), "--json").out)["status"] == "stopped"


def test_edits_of_the_run_are_told(tmp_path: Path) -> None:
    edits = [
        {"kind": "output", "select": "features.*", "value": "scale(0.5)", "ran": 12},
        {"kind": "skip", "select": "head", "value": "", "ran": 1},
        {"kind": "stop", "select": "aux", "value": "", "ran": 0},
    ]
    out = show(str(write_net(tmp_path / "a.thk", edits=edits)), width=120).out
    told = "were on: output features.* scale(0.5) (ran 12 times); skip head (ran once); stop aux (never ran)"
    assert f" edits   {told}\n" in out


def test_other_steps_are_listed_while_they_are_few(tmp_path: Path) -> None:
    few, many = write_steps(tmp_path / "few.thk", [0, 10, 20]), write_steps(tmp_path / "many.thk", range(0, 900, 100))
    assert show(str(few)).out.splitlines()[-1] == f"steps 10, 20 are recorded as well: tenterhook show {few} --step N"
    assert show(str(many)).out.splitlines()[-1] == f"9 steps are recorded, 0 to 800: tenterhook show {many} --step N"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([0], "only 0 was"),
        ([0, 100, 200], "the recorded ones are 0, 100, 200"),
        (range(4), "the recorded ones are 0 to 3"),
        (range(0, 900, 100), "the recorded ones are 0, 100, ..., 800"),
        ([*range(5), *range(10, 50, 5)], "the recorded ones are 13 from 0 to 45 (the nearest: 4, 10)"),
    ],
)
def test_a_step_that_was_not_recorded(tmp_path: Path, steps: list[int], words: str) -> None:
    path = write_steps(tmp_path / "a.thk", steps)
    result = show(str(path), "--step", "7")
    assert (result.code, result.out, result.err) == (4, "", f"tenterhook: step 7 was not recorded\n  {words}\n")


def test_a_step_that_another_rank_recorded(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "a.thk", {0: {0: {}, 2: {}}, 1: {0: {}, 7: {}}})
    err = show(str(path), "--step", "7").err
    assert err == "tenterhook: step 7 of rank 0 was not recorded\n  the recorded ones are 0, 2\n"
    assert show(str(path), "--step", "7", "--rank", "1").code == 0


def test_a_step_with_many_forwards_is_told(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "a.thk", [0] * 12)
    assert "step 0 holds 12 forwards of Net: a step ends when an optimizer steps" in show(str(path), width=200).out
    assert "forwards of Net" not in show(str(write_steps(tmp_path / "b.thk", [0, 0, 1, 1]))).out


def test_limit_says_how_much_is_left(net: Path) -> None:
    out = show("@0", "--as", "order", "--limit", "3").out
    assert "more lines: --limit 0 shows all" in out
    assert "features.0" in out
    assert "rnn" not in out


@pytest.fixture
def long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = "encoder.layers.11.attention.self.query_key_value.projection.dense"
    monkeypatch.setitem(recordings.MODULES_OF_NET, name, "Linear")
    return write_net(tmp_path / "long.thk")


def tables(path: Path, *args: str, width: int) -> tuple[list[str], str]:
    """The lines of all tables of one step, and what is said below them."""
    out = show(str(path), "--step", "1", *args, width=width).out
    *found, below = out[out.index("\nstep 1") :].split("\n\n")
    return [line for table in found for line in table.strip().splitlines()], " ".join(below.split())


@pytest.mark.parametrize("form", ["tree", "order", "table"])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_what_does_not_fit_is_left_out_whole_and_named(long_names: Path, form: str, width: int) -> None:
    everything, _ = tables(long_names, "--as", form, "--wide", width=width)
    shown, below = tables(long_names, "--as", form, width=width)
    assert max(map(len, shown)) <= width
    assert any("! 3 nan, 2 inf" in line for line in shown)
    words = [{word for line in lines for word in line.split()} for lines in (everything, shown)]
    cut = {word for word in words[1] - words[0] if not word.endswith("\N{HORIZONTAL ELLIPSIS}")}
    assert not cut
    titles = [[line.split() for line in lines if "|max|" in line] for lines in (everything, shown)]
    missing = {title for wide, narrow in zip(*titles, strict=True) for title in wide if title not in narrow}
    told = re.match(r"left out for width: ([^;(]+)", below)
    assert missing == (set(told[1].strip().split(", ")) if told else set())
    assert ("--wide shows all" in below) == (everything != shown)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"partial": "the disk is full"}, "PARTIAL"), ({"close": False}, "RUNNING"), ({}, "complete")],
    ids=["partial", "running", "complete"],
)
def test_the_verdict_says_how_whole_it_is(tmp_path: Path, fields: dict, word: str) -> None:
    path = write_net(tmp_path / "a.thk", **fields)
    first = show(str(path)).out.splitlines()[0]
    assert first.startswith("VERDICT")
    assert first.endswith(word)
    assert ("the disk is full" in show(str(path)).out) == ("partial" in fields)


def test_json_has_the_envelope_and_everything_that_is_printed(net: Path) -> None:
    found = json.loads(show("@0", "--json").out)
    assert list(found) == ["tool", "version", "schema", "status", "data"]
    assert (found["tool"], found["status"]) == ("tenterhook", "complete")
    data = found["data"]
    assert data["path"] == "runs/train.thk"
    assert data["steps"] == [0, 1]
    assert data["step"] == 0
    first = data["overview"]["first_nonfinite"]
    assert (first["address"], first["place"], first["step"]) == ("features.0:output#0@1", "features.0", 1)
    assert first["counts"] == {"nan": 3, "+inf": 1, "-inf": 1}
    assert data["overview"]["nonfinite"] == 1
    assert data["coverage"]["missing"] == [["aux", "never called"]]
    assert len(data["rows"]) == data["rows_total"] == sum(data["overview"]["calls"].values()) // 2


def test_json_rows_are_in_order_and_hold_the_statistics(net: Path) -> None:
    rows = json.loads(show("@0", "--json").out)["data"]["rows"]
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    [conv] = [row for row in rows if row["path"] == "features.0" and row["phase"] == "forward"]
    assert conv["values"][0]["statistics"]["std"] == 12345.6789


def test_the_newest_is_number_0(net: Path) -> None:
    older = net.parent / "older.thk"
    write_net(older, note="the older one")
    stamp = (net / "recording.json").stat()
    os.utime(older / "recording.json", ns=(stamp.st_atime_ns, stamp.st_mtime_ns - 10**9))
    assert "the older one" not in show("@0").out
    assert "the older one" in show("@1").out


def test_an_empty_recording_is_not_the_newest(net: Path) -> None:
    write_empty(net.parent / "empty.thk")
    assert json.loads(show("@0", "--json").out)["data"]["path"] == str(net)
    assert show("@1").err == "tenterhook: there is no recording @1: only 1 here and in ./runs, @0 to @0\n"
    assert show("empty").code == 4


def test_where_all_recordings_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_empty(Path("a.thk"))
    found = show("@0")
    assert found.code == 3
    assert found.err.splitlines()[1] == "  the newest one is empty: tenterhook show a.thk"


def test_a_recording_that_is_being_written_is_the_newest(net: Path) -> None:
    path = write_net(Path("running.thk"), close=False)  # by this process, which is alive
    out = show("@0").out
    assert out.splitlines()[0].endswith("RUNNING")
    assert f"process {os.getpid()} is writing it; what had come by now is here" in out
    assert json.loads(show("@0", "--json").out)["status"] == "running"
    (path / "rank-00000" / "claim.json").unlink()
    assert show("@0").out.splitlines()[0].endswith("UNFINISHED")


def test_of_a_run_that_goes_on_the_last_whole_step_is_shown(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "a.thk", range(5), close=False)
    assert "step 3, forward" in show(str(path)).out
    assert "step 0, forward" in show(str(write_steps(tmp_path / "b.thk", range(5)))).out


@pytest.mark.parametrize("name", ["train", "train.thk", "runs/train", "runs/train.thk"])
def test_short_names_are_found(net: Path, name: str) -> None:
    assert show(name).code == 0


def test_empty_recording_is_no_success(tmp_path: Path) -> None:
    result = show(str(write_empty(tmp_path / "a.thk")))
    assert result.code == 4
    assert "0 steps" in result.out


def test_colour_is_for_terminals_only(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(**environment: str) -> str:
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        stream = io.StringIO()
        console = Console(file=stream, highlight=False, width=80)
        monkeypatch.setattr(run_show, "stdout_console", lambda: console)
        run_show.run(recording="@0", form=None, step=None, sites=(), rank=None, limit=9, as_json=False)
        return stream.getvalue()

    plain = printed()
    assert "\x1b[" not in plain
    coloured = printed(FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[32m" in coloured
    assert "\x1b[3" not in printed(NO_COLOR="1")
