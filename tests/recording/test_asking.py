"""What is asked while a run goes on costs what is new, and nothing is asked with a raw error of Python."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.cli.run_show import page_of
from tenterhook.errors import AmbiguousError, NotRecordedError, RecordingError, SelectionError, TenterhookError
from tenterhook.recording import DiskSink, Manifest, MemorySink, Pace, Recording, index, open_recording, parts, query
from tenterhook.recording.buckets import Buckets
from tests.recording.synthetic import modules_table, step_of_rows


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts rows: those that were looked at, and those that became objects; and whole tables that were read."""
    done: Counter[str] = Counter()
    add, make_call, make_value = Buckets.add, index.call_from_row, index.value_from_row

    def counting(self: Buckets, batch: object) -> None:
        done["rows"] += len(batch)
        add(self, batch)

    def count(what: str, make: object) -> object:
        def made(*arguments: object) -> object:
            done[what] += 1
            return make(*arguments)

        return made

    def whole(self: MemorySink, name: str) -> object:
        done["whole"] += name != "modules"
        return given(self, name)

    given = MemorySink._whole
    monkeypatch.setattr(Buckets, "add", counting)
    monkeypatch.setattr(index, "call_from_row", count("calls", make_call))
    monkeypatch.setattr(index, "value_from_row", count("values", make_value))
    monkeypatch.setattr(MemorySink, "_whole", whole)
    for module in (parts, __import__("tenterhook.recording.disk", fromlist=["x"])):
        monkeypatch.setattr(module, "stream_rows", count("streams", parts.stream_rows))
    yield done


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_reading_in_the_loop_looks_at_each_row_once(tmp_path: Path, work: Counter[str], disk: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    steps = 40
    with th.record(model, to=tmp_path / "a.thk" if disk else None, tensors="2") as rec:
        for step in range(steps):
            model(torch.full((2, 3), float(step))).sum().backward()
            for path in ("0", "2"):
                call = rec[path].calls[-1]
                assert call.step == step and len(rec[path].calls) == step + 1
                assert call.select("grad_output")[0].step == call.select("output")[0].step == step
                assert rec[path].backward_calls[-1].output is not None
            assert np.asarray(rec["2"].calls[-1].output).shape == (2, 1)
            assert rec.recording.steps == list(range(step + 1))
    assert work["calls"] == steps * 2 * 2  # forward and backward of two modules
    assert work["values"] == steps * 2 * 3  # input, output and its gradient
    assert work["rows"] == steps * 4 * (2 + 3)  # of four modules
    assert work["whole"] == work["streams"] == 0


def test_a_page_about_a_recording_that_grows_speaks_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    written = 0

    def grow() -> None:
        nonlocal written
        for batch, write in zip(step_of_rows(written), (sink.write_calls, sink.write_values), strict=True):
            write(batch)
        sink.flush()
        written += 1

    grow()
    grow()
    answered = query.run

    def answer(*arguments: Any) -> pa.Table:
        grow()
        return answered(*arguments)

    monkeypatch.setattr(query, "run", answer)
    recording = open_recording(tmp_path / "a.thk")
    page = page_of(recording, "a.thk")
    assert written > 5
    assert page.overview.steps == len(page.steps) == page.overview.values // 5 == sum(page.overview.calls.values()) // 5
    assert len(recording.query("select distinct step from calls")) > page.overview.steps
    monkeypatch.undo()
    sink.close(manifest, modules_table())


def test_streams_that_become_parquet_are_gone_on_with(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest(), pace=Pace(roll_bytes=40_000, shard_bytes=20_000))
    recording = None
    for step in range(60):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"t{step}", np.full(100, step))
        sink.flush()
        recording = recording or open_recording(tmp_path / "a.thk")
        recording.refresh()
        view = recording["conv1"]
        assert [call.step for call in view.calls] == list(range(step + 1))
        assert view.calls[-1].values[0].step == step and view.at(step=step).output.step == step
        assert recording.steps == list(range(step + 1))
        assert recording.tensor(f"t{step}")[0] == step and recording.tensor("t0")[0] == 0
    assert recording is not None and not recording.manifest.complete
    sink.close(Manifest(), modules_table())
    recording.refresh()
    assert recording.manifest.complete and len(recording["conv1"].calls) == 60 and recording.tensor("t59")[0] == 59
    assert not recording.notes


def test_a_message_that_is_half_written_is_waited_for(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest())
    for step in range(3):
        for write, rows in zip((sink.write_calls, sink.write_values), step_of_rows(step), strict=True):
            write(rows)
        sink.flush()
    stream = tmp_path / "a.thk" / "rank-00000" / "calls-00000.arrows"
    whole = stream.read_bytes()
    seen = []
    stream.write_bytes(b"")
    recording = open_recording(tmp_path / "a.thk")
    for end in range(0, len(whole) + 1, 8):
        stream.write_bytes(whole[:end])
        seen.append(len(recording.calls_of("Net", "conv1")) if end else 0)
        recording.refresh()
    assert seen == sorted(seen) and set(seen) == {0, 1, 2, 3}
    sink.close(Manifest(), modules_table())


# addresses


def trained() -> th.Recorder:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ["input", "output", "grad_output", "param", "param_grad", "update"]
    with th.record(model, kinds=kinds, tensors=True) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3))[0].sum().backward()
            optimizer.step()
    return rec


def test_every_address_that_is_printed_names_its_value(tmp_path: Path) -> None:
    rec = trained()
    saved = rec.save(tmp_path / "a.thk") and th.open(tmp_path / "a.thk")
    for recording in (rec, saved):
        values = [value for call in rec.order() for value in call.values]
        assert len(values) > 20
        for seen in values:
            for address in (seen.address, f"Sequential/{seen.address}"):
                assert address in recording
                if seen.dtype == "none":
                    assert recording[address] is None
                else:
                    assert np.array_equal(np.asarray(recording[address]), np.asarray(seen.tensor)), address
        for call in rec.order():
            view = recording[call.address]
            assert (view.path, view.step, view.call) == (call.path, call.step, call.call)
            assert [one.seq for one in (view.calls if call.phase == "forward" else view.backward_calls)] == [call.seq]
    assert len(rec["1@1"].calls) == len(rec["1#0@1"].calls) == 1 and len(rec["1#0"].calls) == 2


def test_parameters_are_asked_by_name_and_step() -> None:
    rec = trained()
    for kind in ("param", "param_grad", "update"):
        found = getattr(rec["0"].at(step=1), kind)
        assert sorted(found) == ["bias", "weight"] and found["weight"].shape == (3, 3)
        assert torch.equal(rec[f"0:{kind}.weight@1"], found["weight"])
        with pytest.raises(
            AmbiguousError, match=rf"0 has {kind} of 2 steps, 0 to 1; choose one: \.at\(step=1\)\.{kind}"
        ):
            getattr(rec["0"], kind)
    with pytest.raises(NotRecordedError, match="no param_grad of 0 was recorded in step 7"):
        rec["0:param_grad@7"]
    sink = MemorySink()
    sink.write_calls(step_of_rows(0)[0])
    with pytest.raises(NotRecordedError, match=r"no param_grad of conv1 was recorded; record\(\.\.\., kinds="):
        Recording(sink)["conv1"].param_grad  # noqa: B018


WRONG = {
    "conv:output#0@0": (NotRecordedError, "no module 'conv' is in this recording; the nearest are conv1"),
    "conv1:outptu#0@0": (SelectionError, "there is no kind 'outptu'; did you mean 'output'"),
    "conv1:output#0@9": (NotRecordedError, "no call of conv1 was recorded in step 9; its calls are in steps 0 to 2$"),
    "conv1:output#3@2": (
        NotRecordedError,
        "no call #3 of conv1 was recorded in step 2; its calls there are numbered 0$",
    ),
    "conv1:output#3": (NotRecordedError, "no call #3 of conv1 was recorded; its calls are numbered 0$"),
    "conv1:output": (AmbiguousError, "called 3 times"),
    "conv1:output.x#0@0": (NotRecordedError, "is one tensor, without a slot"),
    "conv1#zero": (SelectionError, "expected the number of the call after '#'"),
}


@pytest.mark.parametrize("address", WRONG)
def test_an_address_that_names_nothing_says_why(address: str) -> None:
    sink = MemorySink()
    for step in range(3):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
    error, words = WRONG[address]
    with pytest.raises(error, match=words):
        Recording(sink)[address]
    assert (address in Recording(sink)) == (error is AmbiguousError)


@pytest.mark.parametrize("live", [True, False])
def test_errors_are_our_own(live: bool) -> None:
    rec = trained() if live else trained().recording
    for asked in (0, None, 1.5, ("0",), slice(1)):
        with pytest.raises(TenterhookError, match="asked by the path of a module"):
            rec[asked]
        assert asked not in rec
    with pytest.raises(TenterhookError, match=r"not a sequence; go through recording\.order\(\)"):
        list(rec)
    with pytest.raises(RecordingError, match=r"table\(\) needs a name; the tables are calls, values, modules"):
        rec.table()
    assert "0" in rec and "nothing" not in rec


def test_opening_takes_what_the_command_line_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordingError, match=r"there is no recording here or in \./runs"):
        th.open("@0")
    for name in ("a.thk", "b.thk"):
        sink = DiskSink(tmp_path / "runs" / name, Manifest())
        sink.write_calls(step_of_rows(0)[0])
        sink.close(Manifest(note=name), modules_table())
    (tmp_path / "runs" / "a.thk" / "recording.json").touch()
    assert [th.open(f"@{number}").manifest.note for number in (0, 1)] == ["a.thk", "b.thk"]
    with pytest.raises(RecordingError, match=r"no recording @2: only 2 here and in \./runs, @0 to @1"):
        th.open("@2")
    for asked in (3, None, b"a.thk", ["a.thk"]):
        with pytest.raises(RecordingError, match="a recording is opened by its path"):
            th.open(asked)


def test_a_value_can_be_copied() -> None:
    layer = nn.Linear(2, 2)
    with th.record(layer, tensors=True) as rec:
        layer(torch.ones(1, 2))
    value = rec["(root)"].calls[0].values[0]
    other = copy.copy(value)
    assert other == value and other.tensor is value.tensor
    with pytest.raises(AttributeError, match="nothing"):
        _ = object.__new__(type(value)).nothing
