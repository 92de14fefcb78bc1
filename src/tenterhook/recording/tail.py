"""A stream that is being written, read on from where it was left: each batch is read once."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa

from tenterhook.errors import RecordingError
from tenterhook.recording.buckets import Buckets
from tenterhook.recording.files import first_line, plain_file, reading
from tenterhook.recording.source import WRITTEN

__all__ = ["StreamTail"]


class StreamTail:
    """The whole batches of one stream, sorted by module, as far as they have been written.

    Args:
        path: the stream.
        name: its table.

    Attributes:
        buckets: the rows read so far.
        note: why no more can be read; None while all is well.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.buckets = Buckets()
        self.note: str | None = None
        self._path = path
        self._schema = WRITTEN[name]
        self._whole = _WholePart(path)
        self._reader: pa.RecordBatchReader | None = None

    def read_on(self) -> None:
        """Take in the batches that have come.

        Raises:
            FileNotFoundError: it has become Parquet.
            RecordingError: it is not a stream of this table.
        """
        if self.note is not None:
            return
        with reading(self._path):
            plain_file(self._path)
            try:
                if self._whole.look():
                    while (batch := self._next()) is not None:
                        self.buckets.add(batch)
            except (pa.ArrowException, OSError) as error:
                self.note = f"{self._path.name}: what follows its first {self.buckets.rows} rows cannot be read ({first_line(error)})"

    def _next(self) -> pa.RecordBatch | None:
        reader = self._reader or pa.ipc.open_stream(pa.PythonFile(self._whole, mode="r"))
        if reader.schema.names != self._schema.names:
            raise RecordingError(f"{self._path} is damaged: its columns are not those of this table")
        self._reader = reader
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return None
        batch.validate(full=True)  # before its dictionaries are followed
        return batch.cast(self._schema)


class _WholePart(io.RawIOBase):
    """A growing stream that seems to end after its last whole batch. The file is open only while it is looked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._begin = 0  # place in the file of what comes next
        self._data = memoryview(b"")  # whole batches from there on

    def look(self) -> bool:
        """Take in the whole batches that have come; whether there are any."""
        with self._path.open("rb") as file:
            file.seek(self._begin + len(self._data))
            fresh = file.read()
        whole, messages = 0, pa.BufferReader(fresh)
        while True:
            try:
                message = pa.ipc.read_message(messages)
            except (EOFError, pa.ArrowException, OSError):
                break  # the end of the stream, or a message that is being written
            if message.type == "record batch":
                whole = messages.tell()
        self._data = memoryview(bytes(self._data) + fresh[:whole])
        return bool(self._data)

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Give bytes of whole batches only."""
        taken = bytes(self._data if size < 0 else self._data[:size])
        self._data = self._data[len(taken) :]
        self._begin += len(taken)
        return taken
