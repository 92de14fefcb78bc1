"""The files of a recording as they are met on disk: which there are, and what to say of damaged ones."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyarrow as pa

from tenterhook.errors import RecordingError
from tenterhook.recording.manifest import MAX_BYTES, Manifest

__all__ = ["RankFiles", "first_line", "load_manifest", "part_number", "plain_file", "rank_files", "reading"]

_PART = re.compile(r"(calls|values)-(\d{5,9})\.(arrows|parquet)")
_SHARD = re.compile(r"tensors-(\d{5,9})\.safetensors(\.part)?")
_LISTINGS = 20  # until two agree; a folder changes a few times a second at most


@dataclass
class RankFiles:
    """The files in one rank's folder.

    Attributes:
        rank: the rank.
        folder: the folder.
        parquet: table -> its finished parts, in order.
        streams: table -> its parts that are still streams, in order.
        shards: number -> file of tensors.
    """

    rank: int
    folder: Path
    parquet: dict[str, list[Path]] = field(default_factory=lambda: {"calls": [], "values": []})
    streams: dict[str, list[Path]] = field(default_factory=lambda: {"calls": [], "values": []})
    shards: dict[int, Path] = field(default_factory=dict)


def rank_files(folder: Path, rank: int) -> RankFiles:
    """List the files of a rank. Of a part that is there as a stream and as Parquet, Parquet counts."""
    files = RankFiles(rank, folder)
    parts: dict[tuple[str, int], Path] = {}
    for name in _settled_names(folder):
        if match := _PART.fullmatch(name):
            key = (match[1], int(match[2]))
            if key not in parts or match[3] == "parquet":
                parts[key] = folder / name
        elif match := _SHARD.fullmatch(name):
            number = int(match[1])
            if number not in files.shards or not match[2]:
                files.shards[number] = folder / name
    for (table, _), path in sorted(parts.items()):
        (files.parquet if path.suffix == ".parquet" else files.streams)[table].append(path)
    return files


def _settled_names(folder: Path) -> set[str]:
    """List a folder until two listings agree.

    One that is changed while it is listed may miss both names of a part that goes from one to the other.
    """
    names = {path.name for path in folder.iterdir()}
    for _ in range(_LISTINGS):
        again = {path.name for path in folder.iterdir()}
        if again == names:
            break
        names = again
    return names


def part_number(path: Path) -> int:
    """Give the number of a part: 3 of `values-00003.parquet`."""
    return int(path.stem.rpartition("-")[2])


def plain_file(path: Path) -> Path:
    """Give the path back if a plain file is there.

    Raises:
        RecordingError: it is a link out of the recording, a device or a pipe: no recording of ours holds such.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RecordingError(f"{path} is not a plain file, so it is not read")
    return path


def load_manifest(path: Path) -> Manifest:
    """Read a `recording.json`.

    Raises:
        RecordingError: it is damaged, or no plain file of a size that a manifest has.
    """
    with reading(path):
        size = plain_file(path).stat().st_size
        if size > MAX_BYTES:
            raise RecordingError(f"{path} is {size} bytes long, which no recording of ours is")
        return Manifest.from_json(path.read_bytes(), where=str(path))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into one sentence about it."""
    try:
        yield
    except RecordingError:
        raise
    except FileNotFoundError:
        raise  # a part that was compacted while we looked; whoever listed it looks again
    except (
        OSError,
        pa.ArrowException,
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
        OverflowError,
        MemoryError,
        KeyError,
    ) as error:
        raise RecordingError(f"{path} is damaged or not a recording's: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Give the first line of an error's message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
