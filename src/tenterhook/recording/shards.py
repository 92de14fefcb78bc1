"""Tensors on their way to disk: safetensors shards that survive a kill.

A safetensors file begins with a header that names everything in it. While a shard grows, room is kept for the header
and each tensor is announced in a journal beside it (`tensors-00000.jsonl`, one line when its bytes are written); a
full shard gets its header, its name and loses its journal.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from tenterhook.recording.rows import part_name

__all__ = ["STORAGE", "Entry", "ShardWriter", "dtype_named", "finish_shard", "trim_shard"]

SHARD_BYTES = 256 << 20
_FIRST_HEADER = 64 << 10
_PIECE = 16 << 20
_LAST_HEADER = 16 << 20

STORAGE: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""NumPy's name of a dtype -> safetensors' name. Others are stored as bytes (U8, one more dimension) and named in the
metadata."""


_KNOWN = {
    np.dtype(kind).name: np.dtype(np.dtype(kind).name if kind.__module__ == "numpy" else kind)
    for kind in (*np.sctypeDict.values(), *vars(ml_dtypes).values())
    if isinstance(kind, type)
    and issubclass(kind, np.generic)
    and not issubclass(kind, (np.flexible, np.object_, np.datetime64, np.timedelta64))
}
"""Name -> dtype, of plain numbers. NumPy is not asked for other names: it takes some of them for a program."""


class Entry(msgspec.Struct, array_like=True):
    """Where a tensor lies: a line of the journal, a row of the index.

    Attributes:
        key: its key.
        dtype: NumPy's name of its dtype.
        shape: its shape.
        begin: offset of its first byte in the file.
        end: offset after its last byte.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def dtype_named(name: str) -> np.dtype:
    """Give the dtype of a name, of NumPy or ml_dtypes.

    Raises:
        ValueError: no array of plain numbers is called so.
    """
    found = _KNOWN.get(name)
    if found is None:
        raise ValueError(f"no dtype of plain numbers is called {name[:40]!r}")
    return found


class ShardWriter:
    """Appends tensors to shards of about 256 MB in one rank's folder."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES, number: int = 0) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._number = number - 1
        self._header_room = _FIRST_HEADER
        self._data: io.FileIO | None = None
        self._journal: io.FileIO | None = None
        self._entries: list[Entry] = []
        self._keys: set[str] = set()
        self._header_used = 0
        self._position = 0

    def append(self, key: str, tensor: np.ndarray) -> int:
        """Write a tensor. Gives the bytes written.

        Raises:
            ValueError: the key was used before in this shard, or the array is not of plain numbers.
        """
        name = tensor.dtype.name
        dtype_named(name)
        if not tensor.dtype.isnative:
            tensor = tensor.astype(tensor.dtype.newbyteorder("="))
        line = len(msgspec.json.encode(key)) * 2 + len(tensor.shape) * 22 + 160
        if self._data is None or self._position > self._shard_bytes or self._header_used + line > self._header_room:
            self._next(line)
        assert self._data is not None and self._journal is not None
        if key in self._keys:
            raise ValueError(f"two tensors have the key {key!r}")
        raw = (tensor if tensor.flags.c_contiguous else tensor.copy(order="C")).reshape(-1).view(np.uint8)
        _write_all(self._data, memoryview(raw.data))
        entry = Entry(key, name, tensor.shape, self._position, self._position + raw.nbytes)
        _write_all(self._journal, memoryview(msgspec.json.encode(entry) + b"\n"))
        self._entries.append(entry)
        self._keys.add(key)
        self._position = entry.end
        self._header_used += line
        return raw.nbytes

    def stop(self) -> None:
        """Leave the files as they are."""
        for file in (self._data, self._journal):
            if file is not None:
                file.close()
        self._data = self._journal = None

    def close(self) -> int:
        """Finish the last shard. Gives the number of shards."""
        self._finish()
        return self._number + 1

    def _next(self, line: int) -> None:
        many_small = self._data is not None and self._position <= self._shard_bytes
        self._finish()
        if many_small:
            self._header_room = min(self._header_room * 4, _LAST_HEADER)
        self._number += 1
        self._header_room = max(self._header_room, -(-line // 4096) * 4096)
        self._data = io.FileIO(self._folder / part_name("tensors", self._number, "safetensors.part"), "w")
        self._journal = io.FileIO(self._folder / part_name("tensors", self._number, "jsonl"), "w")
        self._entries, self._keys, self._header_used = [], set(), 64
        self._position = 8 + self._header_room
        self._data.seek(self._position)

    def _finish(self) -> None:
        if self._data is None or self._journal is None:
            return
        header = _header(self._entries, self._header_room)
        self._data.seek(0)
        _write_all(self._data, memoryview(len(header).to_bytes(8, "little") + header))
        self.stop()
        draft = self._folder / part_name("tensors", self._number, "safetensors.part")
        draft.rename(draft.with_suffix(""))
        (self._folder / part_name("tensors", self._number, "jsonl")).unlink()


def _header(entries: Sequence[Entry], room: int) -> bytes:
    start = 8 + room
    header: dict[str, object] = {}
    odd: dict[str, str] = {}
    for entry in entries:
        storage = STORAGE.get(entry.dtype)
        shape = list(entry.shape)
        if storage is None:
            storage, shape = "U8", [*shape, dtype_named(entry.dtype).itemsize]
            odd[entry.key] = entry.dtype
        header[entry.key] = {
            "dtype": storage,
            "shape": shape,
            "data_offsets": [entry.begin - start, entry.end - start],
        }
    if odd:
        header["__metadata__"] = odd
    written = msgspec.json.encode(header).ljust(room)
    if len(written) != room:
        raise ValueError(f"the header of a shard takes {len(written)} bytes and {room} were kept")
    return written


def finish_shard(draft: Path, entries: Sequence[Entry]) -> None:
    """Finish a shard that a process has left: with these tensors, in order from its first; none leave no file.

    Args:
        draft: the growing shard, `tensors-00000.safetensors.part`.
        entries: the tensors to keep.
    """
    journal = draft.with_name(draft.name.replace(".safetensors.part", ".jsonl"))
    if entries:
        header = _header(entries, entries[0].begin - 8)
        with io.FileIO(draft, "r+") as file:
            file.truncate(entries[-1].end)
            _write_all(file, memoryview(len(header).to_bytes(8, "little") + header))
        draft.rename(draft.with_suffix(""))
    else:
        draft.unlink()
    journal.unlink(missing_ok=True)


def trim_shard(shard: Path, entries: Sequence[Entry]) -> None:
    """Cut the end off a finished shard, by rename; without any tensor left it is removed.

    Args:
        shard: `tensors-00000.safetensors`.
        entries: the tensors to keep, in order from its first.
    """
    if not entries:
        shard.unlink()
        return
    draft = shard.with_name(shard.name + ".tmp")
    header = _header(entries, entries[0].begin - 8)
    with shard.open("rb") as source, io.FileIO(draft, "w") as target:
        _write_all(target, memoryview(len(header).to_bytes(8, "little") + header))
        source.seek(entries[0].begin)
        left = entries[-1].end - entries[0].begin
        while left:
            piece = source.read(min(left, _PIECE))
            _write_all(target, memoryview(piece))
            left -= len(piece)
    draft.replace(shard)


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while data:
        written = file.write(data)
        if not written:
            raise OSError(os.strerror(28))
        data = data[written:]
