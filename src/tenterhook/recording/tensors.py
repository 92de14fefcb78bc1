"""Stored tensors, read by key: memory-mapped, nothing loaded before its elements are looked at.

What is given can be written to, as frameworks ask of an array that they share memory with (`torch.from_numpy` warns otherwise). Maps are
copy-on-write: what is written goes into the process's own memory, never into the file. A tensor is given once of a map, so that
who asks again gets what is in the file, whatever has become of the first array.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording.files import plain_file, reading
from tenterhook.recording.parts import small_table
from tenterhook.recording.shards import STORAGE, Entry, dtype_named
from tenterhook.recording.source import table_of_rows

__all__ = ["INDEX", "INDEX_NAME", "TensorStore", "shard_entries", "write_index"]

INDEX_NAME = "tensors.parquet"
INDEX = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),  # number of the file
        pa.field("dtype", pa.string(), nullable=False),  # NumPy's name
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("begin", pa.int64(), nullable=False),  # offsets in the file, not in its data section
        pa.field("end", pa.int64(), nullable=False),
    ]
)
"""The index `tensors.parquet`, written on close: what the headers of all shards say, in one file."""

_NAMED = {storage: name for name, storage in STORAGE.items()}
_MAX_HEADER = 100 << 20  # safetensors' own limit
_OPEN_SHARDS = 64
_ALL = -1


class _Described(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass
class _Map:
    """A shard in memory, and the keys of what has been given of it to do with as one likes."""

    data: np.ndarray
    given: set[str] = field(default_factory=set)


class TensorStore:
    """The tensors in one rank's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, Path] = {}
        self._finished = False
        self._index: dict[str, tuple[int, Entry]] = {}
        self._read: dict[int, int] = {}  # shard -> bytes of its journal that are in the index, _ALL once it is finished
        self._looked = True  # whether the index holds what the files say
        self._maps: OrderedDict[tuple[int, bool], _Map] = OrderedDict()  # by shard, and whether it can be written to

    def look(self, files: dict[int, Path], *, finished: bool) -> None:
        """Take note of the shards that there are now: number -> file; of finished ones what was read is kept."""
        for number, path in self._files.items():
            if path.suffix == ".part":
                for own in (True, False):
                    self._maps.pop((number, own), None)  # it may have grown since
        self._files, self._finished, self._looked = files, finished, False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the maps: a worker process opens its own."""
        return {**self.__dict__, "_maps": OrderedDict()}

    def __contains__(self, key: str) -> bool:
        return key in self._entries()

    def __len__(self) -> int:
        return len(self._entries())

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def get(self, key: str, *, own: bool = True) -> np.ndarray:
        """Give a tensor, memory-mapped.

        Args:
            key: its key.
            own: whether it may be written to, which changes neither the file nor what is given to others.

        Raises:
            NotRecordedError: it is not there.
            RecordingError: the index and the file do not agree.
        """
        found = self._entries().get(key)
        if found is None:
            raise NotRecordedError(f"no tensor {key!r} is stored in {self._folder}")
        shard, entry = found
        data = self._given(shard, key) if own else self._map(shard, own=False).data
        if data is None:
            return self.get(key, own=False).copy()
        dtype = _checked(entry, len(data), self._files[shard])
        raw = data[entry.begin : entry.end]
        if entry.begin % dtype.itemsize:
            raw = raw.copy()  # the file has no holes, so what follows an odd size is not aligned
        return raw.view(dtype).reshape(entry.shape)

    def _given(self, shard: int, key: str) -> np.ndarray | None:
        """Give a map of which this tensor has not been given yet; None where the system has none left."""
        known = self._maps.get((shard, True))
        if known is not None and key in known.given:
            self._map(shard, own=False)  # to copy from it where no further file can be opened
            del self._maps[shard, True]  # arrays that were given out keep their own hold on it
        try:
            found = self._map(shard, own=True)
        except RecordingError:
            return None
        found.given.add(key)
        return found.data

    def _map(self, shard: int, *, own: bool) -> _Map:
        place = shard, own
        if place not in self._maps:
            path = self._files[shard]
            with reading(path):
                self._maps[place] = _Map(np.asarray(np.memmap(plain_file(path), np.uint8, "c" if own else "r")))
            if len(self._maps) > _OPEN_SHARDS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(place)
        return self._maps[place]

    def _entries(self) -> dict[str, tuple[int, Entry]]:
        if not self._looked:
            index = self._folder / INDEX_NAME
            if self._finished and not self._read and index.exists():
                self._index = _read_index(index, self._files)
                self._read = dict.fromkeys(self._files, _ALL)
            for number, path in sorted(self._files.items()):
                read = self._read.get(number, 0)
                if read == _ALL:
                    continue
                if path.suffix == ".part":
                    fresh, self._read[number] = _journal_entries(path, read)
                else:
                    fresh, self._read[number] = shard_entries(path), _ALL
                self._index.update((entry.key, (number, entry)) for entry in fresh)
            self._looked = True
        return self._index


def shard_entries(path: Path) -> list[Entry]:
    """Say what is in a shard: by its header, or by its journal while it grows.

    Raises:
        RecordingError: the header is damaged, or declares more than there is.
    """
    if path.suffix == ".part":
        return _journal_entries(path)[0]
    with reading(path), plain_file(path).open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise RecordingError(f"{path} is damaged: it declares a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = msgspec.json.decode(file.read(length).rstrip(b"\0"), type=dict[str, msgspec.Raw])
        odd = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = [
            _entry(key, msgspec.json.decode(raw, type=_Described), odd, 8 + length) for key, raw in header.items()
        ]
    for entry in entries:
        _checked(entry, size, path)
    return entries


def write_index(folder: Path, files: dict[int, Path]) -> None:
    """Gather the headers of all shards into the index; without shards there is none."""
    if not files:
        return
    draft = folder / (INDEX_NAME + ".tmp")
    with pq.ParquetWriter(str(draft), INDEX, compression="zstd") as writer:
        for number, path in sorted(files.items()):
            rows = [{"shard": number, **msgspec.structs.asdict(entry)} for entry in shard_entries(path)]
            writer.write_table(table_of_rows(rows, INDEX))
    draft.replace(folder / INDEX_NAME)


def _entry(key: str, described: _Described, odd: dict[str, str], start: int) -> Entry:
    name, shape = _NAMED.get(described.dtype, described.dtype), described.shape
    if key in odd:
        name, shape = odd[key], shape[:-1]
    begin, end = described.data_offsets
    if begin < 0:
        raise ValueError(f"tensor {key[:80]!r} begins {-begin} bytes before the data")
    return Entry(key, name, tuple(shape), start + begin, start + end)


def _journal_entries(path: Path, begin: int = 0) -> tuple[list[Entry], int]:
    """Read a journal from a byte on; gives its entries, and how far it is whole."""
    journal = path.with_name(path.name.replace(".safetensors.part", ".jsonl"))
    entries = []
    with reading(path), plain_file(path).open("rb") as data:
        text = b""
        if journal.exists():
            with plain_file(journal).open("rb") as file:
                file.seek(begin)
                text = file.read()
        size = os.fstat(data.fileno()).st_size  # looked at last: the writer puts a tensor there before its line
        whole = text[: text.rfind(b"\n") + 1]  # what follows the last line feed was cut off by the kill
        for line in whole.split(b"\n")[:-1]:
            entry = msgspec.json.decode(line, type=Entry)
            if entry.end <= size:
                _checked(entry, size, path)
                entries.append(entry)
    return entries, begin + len(whole)


def _read_index(index: Path, files: dict[int, Path]) -> dict[str, tuple[int, Entry]]:
    entries = {}
    for row in small_table(index, INDEX).to_pylist():
        shard = row.pop("shard")
        if shard not in files:
            raise RecordingError(f"{index} names shard {shard}, which is not there")
        row["shape"] = tuple(row["shape"])
        entries[row["key"]] = (shard, Entry(**row))
    return entries


def _checked(entry: Entry, size: int, path: Path) -> np.dtype:
    try:
        dtype = dtype_named(entry.dtype)
    except ValueError as error:
        raise RecordingError(f"{path} is damaged: tensor {entry.key[:80]!r}: {error}") from error
    needed = math.prod(entry.shape) * dtype.itemsize if all(length >= 0 for length in entry.shape) else -1
    if len(entry.shape) > 64 or needed != entry.end - entry.begin or not 8 <= entry.begin <= entry.end <= size:
        raise RecordingError(
            f"{path} is damaged: tensor {entry.key[:80]!r} is declared as {entry.dtype} {entry.shape} at bytes "
            f"{entry.begin} to {entry.end} of {size}"
        )
    return dtype
