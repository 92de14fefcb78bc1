"""Coverage-guided fuzzing of what reads a recording's files, by atheris: python -m tests.fuzz.fuzz_reader CORPUS [-max_total_time=SECONDS].

The first byte of an input says which file the rest is; seeds are put into CORPUS, an own directory, at the start. What a
reader may do with any bytes is to read them or to raise RecordingError. Anything else is a fault: it gets a test in tests/recording and is
mended. Run by hand, like the fuzzing of tests/recording/test_damage.py, which goes through whole recordings.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris  # pyright: ignore[reportMissingModuleSource] - installed by who fuzzes

with atheris.instrument_imports(include=["tenterhook"]):
    from tenterhook.errors import NotRecordedError, RecordingError
    from tenterhook.recording import DiskSink, Manifest
    from tenterhook.recording import target as targets
    from tenterhook.recording.parts import stream_rows
    from tenterhook.recording.tail import StreamTail
    from tenterhook.recording.tensors import TensorStore, shard_entries

import numpy as np

from tests.recording.synthetic import modules_table, step_of_rows


def _manifest(folder: Path, data: bytes) -> None:
    manifest = Manifest.from_json(data)
    Manifest.from_json(manifest.to_json())


def _shard(folder: Path, data: bytes) -> None:
    path = folder / "tensors-00000.safetensors"
    path.write_bytes(data)
    _tensors(folder, path)


def _journal(folder: Path, data: bytes) -> None:
    (folder / "tensors-00000.jsonl").write_bytes(data)
    path = folder / "tensors-00000.safetensors.part"
    if not path.exists():
        path.write_bytes(b"\0" * 4096)
    _tensors(folder, path)


def _tensors(folder: Path, path: Path) -> None:
    store = TensorStore(folder)
    store.look({0: path}, finished=False)
    for entry in shard_entries(path):
        repr(store.get(entry.key))


def _stream(folder: Path, data: bytes) -> None:
    path = folder / "calls-00000.arrows"
    path.write_bytes(data)
    stream_rows(path, "calls").to_pylist()


def _tail(folder: Path, data: bytes) -> None:
    """Read a stream in two looks, as it grows."""
    path = folder / "calls-00000.arrows"
    path.write_bytes(data[: len(data) // 2])
    tail = StreamTail(path, "calls")
    tail.read_on()
    path.write_bytes(data)
    tail.read_on()
    for module in tail.buckets.modules:
        for batch in tail.buckets.after(module, 0):
            batch.to_pylist()


def _claim(folder: Path, data: bytes) -> None:
    rank = targets.rank_folder(folder, 0)
    rank.mkdir(exist_ok=True)
    (rank / targets.CLAIM_NAME).write_bytes(data)
    targets.writers(folder)


READERS: tuple[Callable[[Path, bytes], None], ...] = (_manifest, _shard, _journal, _stream, _tail, _claim)


def _seeds(folder: Path, corpus: Path) -> None:
    sink = DiskSink(folder / "a.thk", Manifest(argv=["train.py"], options={"every": 1}, edits=[{"kind": "output"}]))
    for step in range(2):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"{step}", np.full((2, 3), step, np.float32))
        sink.write_tensor(f"c{step}", np.full((1,), step, np.complex64))
    sink.flush()
    rank = folder / "a.thk" / "rank-00000"
    stream, journal, claim = (
        (rank / name).read_bytes() for name in ("calls-00000.arrows", "tensors-00000.jsonl", "claim.json")
    )
    sink.close(Manifest(), modules_table())
    shard = (rank / "tensors-00000.safetensors").read_bytes()
    length = int.from_bytes(shard[:8], "little")  # padded to 64 kB; a fuzzer needs it short
    header = shard[8 : 8 + length].rstrip()
    small = len(header).to_bytes(8, "little") + header + shard[8 + length :]
    manifest = (folder / "a.thk" / "recording.json").read_bytes()
    for number, data in enumerate((manifest, small, journal, stream, stream, claim)):
        (corpus / f"seed-{number}").write_bytes(bytes([number]) + data)


def main() -> None:
    """Fuzz until told to stop."""
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        folder = Path(made)
        _seeds(folder, Path(sys.argv[1]))

        def one(data: bytes) -> None:
            if not data:
                return
            place = folder / str(data[0] % len(READERS))
            place.mkdir(exist_ok=True)
            try:
                READERS[data[0] % len(READERS)](place, data[1:])
            except (RecordingError, NotRecordedError) as error:
                assert str(error) and "\n" not in str(error)

        atheris.Setup([*sys.argv, "-max_len=20000", "-rss_limit_mb=2048", "-timeout=20"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
