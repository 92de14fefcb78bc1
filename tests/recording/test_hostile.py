"""Recordings that were made to do harm, and places that are not what a directory on a local disk is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tenterhook.errors import RecordingError, TargetError
from tenterhook.recording import DiskSink, Manifest, Model, open_recording, parts, target
from tenterhook.recording.dump import dump
from tenterhook.recording.schema import VALUES
from tests.cli.commands import tenterhook
from tests.recording.synthetic import call, calls_batch, many_values, modules_table, step_of_rows, value, values_batch

ROOT = Path(__file__).parents[2]
RANK = "rank-00000"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
DEEP = "[" * 200_000 + "]" * 200_000


def written(path: Path, *, close: bool = True) -> Path:
    sink = DiskSink(path, Manifest())
    for step in range(3):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"t{step}", np.full(4, step))
    sink.flush()
    if close:
        sink.close(Manifest(), modules_table())
        return path
    copy = shutil.copytree(path, path.with_name("killed.thk"))
    sink.close(Manifest(), modules_table())
    (copy / RANK / "claim.json").unlink()
    return copy


def ask_everything(path: Path) -> None:
    recording = open_recording(path)
    for table in ("calls", "values", "modules"):
        recording.table(table)
    recording.query("select * from values")
    recording.first_nonfinite()
    [repr(value) for call in recording.order() for value in call.values]
    for key in ("t0", "t2"):
        recording.tensor(key).sum()


# paths that climb out


@pytest.mark.parametrize(
    "name", ["recording.json", f"{RANK}/values-00000.parquet", f"{RANK}/calls-00000.parquet", f"{RANK}/modules.parquet",
             f"{RANK}/tensors.parquet", f"{RANK}/tensors-00000.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_nothing_but_plain_files_is_read(tmp_path: Path, name: str, kind: str) -> None:
    path = written(tmp_path / "a.thk")
    victim = path / name
    secret = victim.rename(tmp_path / "secret")
    if kind == "link":
        victim.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(victim)  # reading it would wait for ever
    else:
        victim.mkdir()
    with pytest.raises(RecordingError, match="is not a plain file"):
        ask_everything(path)


@pytest.mark.parametrize("name", ["values-00000.arrows", "tensors-00000.safetensors.part", "tensors-00000.jsonl"])
def test_of_an_unfinished_one_neither(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "a.thk", close=False)
    (path / RANK / name).rename(tmp_path / "secret")
    (path / RANK / name).symlink_to(tmp_path / "secret")
    with pytest.raises(RecordingError, match="is not a plain file"):
        ask_everything(path)


def test_a_rank_that_lies_elsewhere_is_no_rank(tmp_path: Path) -> None:
    path, other = written(tmp_path / "a.thk"), written(tmp_path / "b.thk")
    (path / "rank-00001").symlink_to(other / RANK)
    (path / "rank-00002").write_text("a file")
    (path / "rank-99999999999").mkdir()
    assert open_recording(path).ranks == [0]


# huge declared sizes


def huge_footer(path: Path) -> None:
    """A part that declares two thousand million rows: the footer of a real one with another number in it."""
    part = path / RANK / "values-00000.parquet"
    schema = pa.schema([VALUES.field("seq"), VALUES.field("step")])
    with pq.ParquetWriter(part, schema, use_dictionary=True) as writer:
        zeros = pa.table({name: np.zeros(1 << 20, np.int64) for name in schema.names}, schema=schema)
        for _ in range(17):
            writer.write_table(zeros)


def compressed_bomb(path: Path) -> None:
    """A stream whose buffers say that they are a terabyte when they are unpacked."""
    part = path / RANK / "values-00001.arrows"
    with (
        pa.OSFile(str(part), "wb") as file,
        pa.ipc.new_stream(file, VALUES, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream,
    ):
        stream.write_batch(many_values(1000))
    content = part.read_bytes()
    size = (8000).to_bytes(8, "little")
    assert content.count(size) > 5
    part.write_bytes(content.replace(size, (1 << 40).to_bytes(8, "little")))


def declared_header(path: Path) -> None:
    shard = path / RANK / "tensors-00000.safetensors"
    (path / RANK / "tensors.parquet").unlink()
    shard.write_bytes((1 << 40).to_bytes(8, "little") + shard.read_bytes()[8:])


def sparse_manifest(path: Path) -> None:
    with (path / "recording.json").open("r+b") as file:
        file.truncate(1 << 42)


def many_ranks(path: Path) -> None:
    manifest = json.loads((path / "recording.json").read_bytes())
    (path / "recording.json").write_text(json.dumps({**manifest, "world": 10**30, "rank": 10**30, "steps": 10**30}))


HUGE: dict[Callable[[Path], None], str] = {
    huge_footer: "declares 17825792 rows, which no part of ours has",
    compressed_bomb: "",  # read up to there
    declared_header: "declares a header of 1099511627776 bytes",
    sparse_manifest: "bytes long, which no recording of ours is",
    many_ranks: "",
}


@pytest.mark.parametrize("spoil", HUGE, ids=lambda spoil: spoil.__name__)
def test_declared_sizes_take_no_memory(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = written(tmp_path / "a.thk")
    spoil(path)
    code = """
import resource, sys
from pathlib import Path
from tenterhook.errors import RecordingError
from tests.recording.test_hostile import ask_everything, dump, written
ask_everything(written(Path(sys.argv[1]) / "warm.thk"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    ask_everything(Path(sys.argv[2]))
    list(dump(sys.argv[2]))
except RecordingError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "MB")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", code, str(tmp_path), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said, _, more = done.stdout.rpartition("\n")[0].rpartition("\n")
    assert HUGE[spoil] in said and int(more.split()[0]) < 100, done.stdout


# JSON without end


@pytest.mark.parametrize(
    "text", [DEEP, '{"format_version": "1.0", "edits": ' + DEEP + "}", '{"format_version":' * 99_999]
)
def test_a_manifest_without_end(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "a.thk")
    (path / "recording.json").write_text(text)
    with pytest.raises(RecordingError, match=r"recording\.json is damaged"):
        open_recording(path)
    with pytest.raises(RecordingError, match=r"recording\.json is damaged"):
        DiskSink(path, Manifest(), resume=True)


def test_a_header_without_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.thk")
    (path / RANK / "tensors.parquet").unlink()
    header = f'{{"t0": {DEEP}}}'.encode()
    (path / RANK / "tensors-00000.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RecordingError, match=r"tensors-00000\.safetensors is damaged"):
        ask_everything(path)


def test_a_journal_without_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.thk", close=False)
    (path / RANK / "tensors-00000.jsonl").write_text(DEEP + "\n")
    with pytest.raises(RecordingError, match=r"tensors-00000\.safetensors\.part is damaged"):
        ask_everything(path)


# who writes there


CLAIMS = {
    "deep": DEEP,
    "long": '{"host": "' + "x" * 100_000 + '", "pid": 1}',
    "no-json": "\0\1",
    "no-such-pid": json.dumps({"host": socket.gethostname(), "pid": 2**40}),
    "group": json.dumps({"host": socket.gethostname(), "pid": 0}),
    "all": json.dumps({"host": socket.gethostname(), "pid": -1}),
    "another-type": '{"host": 3, "pid": "x"}',
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_is_none_keeps_nobody_out(tmp_path: Path, claim: str) -> None:
    path = written(tmp_path / "a.thk", close=False)
    (path / RANK / "claim.json").write_text(CLAIMS[claim])
    DiskSink(path, Manifest(), resume=True).close(Manifest(), modules_table())
    (path / RANK / "claim.json").write_text(CLAIMS[claim])
    DiskSink(path, Manifest(), overwrite=True).close(Manifest(), modules_table())
    assert open_recording(path).manifest.complete


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_a_writer_on_another_machine_is_left_alone_until_it_rests(tmp_path: Path, how: str) -> None:
    path = written(tmp_path / "a.thk", close=False)
    (path / RANK / "claim.json").write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    with pytest.raises(
        TargetError, match="is being written by process 1 on elsewhere: its files changed 0 seconds ago"
    ):
        DiskSink(path, Manifest(), overwrite=how == "overwrite", resume=how == "resume")
    assert open_recording(path).steps == [0, 1, 2]
    for file in (path / RANK).iterdir():
        os.utime(file, (time.time() - 60,) * 2)
    DiskSink(path, Manifest(), overwrite=how == "overwrite", resume=how == "resume").close(Manifest(), modules_table())
    assert open_recording(path).steps == ([] if how == "overwrite" else [0, 1])


# file systems


def test_a_file_system_that_cannot_lock_or_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unable(number: int) -> Callable[..., None]:
        def fails(*arguments: object) -> None:
            raise OSError(number, os.strerror(number))

        return fails

    path = written(tmp_path / "a.thk", close=False)
    monkeypatch.setattr(os, "fsync", unable(errno.EINVAL))
    monkeypatch.setattr(fcntl, "flock", unable(errno.ENOLCK))
    sink = DiskSink(path, Manifest(), resume=True)
    sink.close(Manifest(), modules_table())
    assert sink.failure is None and open_recording(path).manifest.complete
    monkeypatch.setattr(fcntl, "flock", unable(errno.EIO))
    with pytest.raises(TargetError, match="cannot be resumed: Input/output error"):
        DiskSink(path, Manifest(), resume=True)
    monkeypatch.setattr(os, "fsync", unable(errno.EIO))
    with pytest.raises(TargetError, match="cannot be written: Input/output error"):
        DiskSink(tmp_path / "b.thk", Manifest())
    assert not (tmp_path / "b.thk").exists()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_file_system_that_goes_away_stops_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    from tenterhook.recording import rows

    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    append, calls = rows.RowWriter.append, [0]

    def fails(self: rows.RowWriter, batches: list[pa.RecordBatch]) -> int:
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(number, os.strerror(number))
        return append(self, batches)

    monkeypatch.setattr(rows.RowWriter, "append", fails)
    for step in range(3):
        for write, batch in zip((sink.write_calls, sink.write_values), step_of_rows(step), strict=True):
            write(batch)
        sink.flush()
    sink.close(manifest, modules_table())
    assert sink.failure == f"writing stopped: {os.strerror(number)}" and manifest.lost_rows == 20
    recording = open_recording(tmp_path / "a.thk")
    assert recording.steps == [0] and recording.manifest.partial == sink.failure


def test_a_target_that_is_read_only_is_refused_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a read-only file system answers; mounting a real one is not permitted everywhere."""
    killed = written(tmp_path / "a.thk", close=False)

    def refuses(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        for name in ("mkdir", "write_bytes", "unlink", "rename", "replace"):
            patch.setattr(Path, name, refuses)
        for path in (tmp_path / "a.thk", killed):
            ask_everything(path)
            assert list(dump(path))
        with pytest.raises(TargetError, match=r"new\.thk cannot be written: Read-only file system"):
            DiskSink(tmp_path / "new.thk", Manifest())
        for options in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(TargetError, match=r"a\.thk cannot be written: Read-only file system"):
                DiskSink(tmp_path / "a.thk", Manifest(), **options)
    assert open_recording(tmp_path / "a.thk").manifest.complete and open_recording(killed).steps == [0, 1, 2]


def test_the_limits_are_above_what_is_written() -> None:
    from tenterhook.recording import rows

    smallest = many_values(1000, sketch=False)
    assert rows.ROLL_BYTES // (smallest.nbytes // 1000) * 4 < parts.MAX_ROWS
    assert target._MAX_CLAIM > 1000


# terminals

COMMANDS = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


def test_a_recording_cannot_command_the_terminal(tmp_path: Path) -> None:
    manifest = Manifest(
        note=COMMANDS, error=COMMANDS, partial=COMMANDS, argv=[COMMANDS], told=[COMMANDS], framework=COMMANDS,
        versions={COMMANDS: COMMANDS}, edits=[{"kind": COMMANDS, "value": COMMANDS}], models=[Model(name=COMMANDS)],
    )  # fmt: skip
    sink = DiskSink(tmp_path / "a.thk", manifest)
    where = {"model": COMMANDS, "path": f"a{COMMANDS}"}
    sink.write_calls(calls_batch(call(0, **where, type=COMMANDS, error=COMMANDS)))
    sink.write_values(values_batch(value(1, 0, **where, dtype=COMMANDS, note=COMMANDS, nan_count=1)))
    sink.close(manifest, modules_table())
    path = str(tmp_path / "a.thk")
    shown = [tenterhook("show", path, *options) for options in ((), ("--as", "order"), ("--as", "table"), ("--json",))]
    assert [one.code for one in shown] == [0, 0, 0, 0]
    json.loads(shown[-1].out)
    shown.append(tenterhook("show", path, "--site", "nothere"))
    command = [sys.executable, "-m", "tenterhook.recording.dump", path]
    dumped = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout
    for text in [*(one.out + one.err for one in shown), dumped]:
        assert text and not {character for character in text if unicodedata.category(character) in ("Cc", "Cf")} - {
            "\n"
        }
    (tmp_path / "b.thk").mkdir()
    (tmp_path / "b.thk" / "recording.json").write_text(json.dumps({"format_version": COMMANDS}))
    refused = tenterhook("show", str(tmp_path / "b.thk"))
    assert refused.code == 3 and "\x1b" not in refused.err and "\x9b" not in refused.err
