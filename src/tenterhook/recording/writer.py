"""A recording on disk, written by a thread of its own while the run goes on."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tenterhook.recording import converters
from tenterhook.recording import target as places
from tenterhook.recording.bounded import BoundedQueue
from tenterhook.recording.files import first_line, rank_files
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.pace import USUAL, Pace
from tenterhook.recording.resume import Resumed, begin_at
from tenterhook.recording.resume import resume as resume_recording
from tenterhook.recording.rows import RowWriter, write_modules
from tenterhook.recording.schema import CALLS, VALUES
from tenterhook.recording.shards import ShardWriter
from tenterhook.recording.tensors import write_index

__all__ = ["DiskSink", "Pace"]

_log = logging.getLogger("tenterhook")

_BATCH_BYTES = 32 << 20
_WAIT_TOLD = 1.0  # seconds of waiting for the disk, in all, after which the user is told


class _Item(msgspec.Struct):
    table: str  # "calls", "values", "tensors"; "job": something to do when all before it is written; "" for a request to flush
    size: int = 0
    batch: Any = None
    key: str = ""
    done: Any = None

    @property
    def rows(self) -> int:
        return len(self.batch) if self.table in ("calls", "values") else 0


class DiskSink:
    """Writes a recording to `NAME.thk/`.

    Rows and tensors go through a bounded queue to a thread that writes them at least each `pace.flush_interval` seconds; a
    process that is killed loses no more than that. A slow disk slows the run, which is told once (a warning of the logger
    `tenterhook`) and in `cost.blocked_seconds`. A full disk, or any other error while writing, stops the recording and not the run:
    `failure` says why, the manifest is marked partial, later rows are counted as lost. A forked child writes nothing.

    Args:
        target: the directory, which must not exist.
        manifest: what is known at the start; `world` above 1 lets the ranks share the directory.
        rank: number of this process.
        overwrite: replace an older recording; nothing else is ever deleted.
        resume: go on with a recording that is there (see `resumed`); a new one where there is none. A number (0 is one, and
            not False) is that of the step that comes next.
        budget: bytes of tensors that may be stored; then tensors stop and rows go on.
        pace: how often, and in what portions, it is written.

    Raises:
        TargetError: the target exists, or cannot be written.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        manifest: Manifest,
        *,
        rank: int = 0,
        overwrite: bool = False,
        resume: bool | int = False,
        budget: int | None = None,
        pace: Pace = USUAL,
    ) -> None:
        self.path = Path(target).absolute()
        self._pid = os.getpid()
        self._rank, self._world = rank, manifest.world
        self._budget = budget
        self._accepted = 0
        self._tensors_stopped: str | None = None
        self._closed = self._slow_told = False
        self.resumed: Resumed | None = None
        folder = places.rank_folder(self.path, rank)
        at = None if isinstance(resume, bool) else resume
        self._goes_on = resume is not False and places.has_begun(self.path, folder, rank)
        if self._goes_on:
            self.resumed = resume_recording(self.path, folder, manifest, at)
            self._accepted = self.resumed.tensor_bytes
        else:
            self.resumed = begin_at(at, manifest) if at else None
            folder = places.claim(self.path, manifest, rank, overwrite=overwrite)
        self._worker = _Worker(folder, pace, self.resumed)
        # The thread knows only the worker, so a forgotten sink is collected, and what it holds still reaches the disk.
        self._finalizer = weakref.finalize(self, _Worker.finish, self._worker)

    @property
    def failure(self) -> str | None:
        """Why writing stopped; None while all is well."""
        return self._worker.failure

    @property
    def lost_rows(self) -> int:
        """Rows that were handed over and are not on the disk, because of `failure`."""
        return self._worker.lost

    @property
    def tensors_stopped(self) -> str | None:
        """Why tensors are no longer stored; None while they are."""
        return self._tensors_stopped

    @property
    def blocked_seconds(self) -> float:
        """Seconds that the run waited for the disk."""
        return self._worker.queue.waited

    def write_calls(self, batch: pa.RecordBatch) -> None:
        """Hand over rows of the schema `CALLS`."""
        self._put(_Item("calls", _batch_size(batch, 150), batch))

    def write_values(self, batch: pa.RecordBatch) -> None:
        """Hand over rows of the schema `VALUES`."""
        self._put(_Item("values", _batch_size(batch, 470), batch))

    def write_tensor(self, key: str, tensor: Any) -> bool:
        """Hand over a tensor, which must not be changed from now on.

        Args:
            key: what the column `tensor` of the value's row says; unique in this rank.
            tensor: an ndarray, of ml_dtypes too; tensors of a framework are converted here, in the calling thread.

        Returns:
            Whether it will be stored; False over budget, after a failure and in a forked child.
        """
        if self._tensors_stopped or self.failure or self._foreign():
            return False
        array = np.asarray(converters.to_numpy(tensor))
        if self._budget is not None and self._accepted + array.nbytes > self._budget:
            self._tensors_stopped = f"the budget of {self._budget} bytes was reached at {key}"
            _log.warning("%s: %s; tensors are no longer stored, rows are", self.path, self._tensors_stopped)
            return False
        if not self._put(_Item("tensors", array.nbytes, array, key)):
            return False
        self._accepted += array.nbytes
        return True

    def steps_ended(self, before: int) -> None:
        """Sign that the steps before this one are whole, once what was handed over is in the files."""
        self._put(_Item("job", batch=partial(places.sign, places.rank_folder(self.path, self._rank), before)))

    def describe(self, manifest: Manifest) -> None:
        """Publish what is known by now, such as the models of a script; the recording may not come to be closed."""
        known = msgspec.structs.replace(manifest)
        self._put(_Item("job", batch=partial(places.write_manifest, self.path, known, self._rank)))

    def flush(self) -> None:
        """Return when all that was handed over is in the files."""
        done = threading.Event()
        if self._put(_Item("", done=done)):
            while not done.wait(0.1) and self._worker.thread.is_alive():
                pass

    def close(self, manifest: Manifest, modules: pa.Table) -> None:
        """Finish: write what is left, compact to Parquet, publish `recording.json` with `complete: true` last.

        Sets `complete`, `partial`, `lost_rows`, `tensors_stopped` and `cost.blocked_seconds` of the manifest. Where it is interrupted
        (a second Ctrl-C), what was handed over is written all the same, and left as after a kill: unfinished.
        """
        if self._closed or self._foreign():
            return
        self._closed = True
        self._finalizer.detach()
        try:
            self._worker.finish(modules)
        except BaseException:
            self._leave(manifest)
            raise
        self._tell_end(manifest, complete=True)

    def break_off(self, manifest: Manifest) -> None:
        """End at once, as after a kill: what was handed over is written, and the recording stays unfinished."""
        if self._closed or self._foreign():
            return
        self._closed = True
        self._finalizer.detach()
        self._leave(manifest)

    def _leave(self, manifest: Manifest) -> None:
        self._worker.break_off()
        manifest.steps = max(0, manifest.steps - 1)  # up to where it is known to be whole
        self._tell_end(manifest, complete=False)

    def _tell_end(self, manifest: Manifest, *, complete: bool) -> None:
        # Added to what the manifest has: that of a copy, or of a recording that is gone on with, tells of earlier losses.
        manifest.tensors_stopped = self._tensors_stopped or manifest.tensors_stopped
        manifest.cost.blocked_seconds += self._worker.queue.waited
        manifest.lost_rows += self.lost_rows
        if self.failure:
            manifest.steps_recorded = None  # of what was seen, nobody has counted what reached the disk
            manifest.partial = self.failure if manifest.partial is None else f"{manifest.partial}; {self.failure}"
        manifest.complete = complete
        try:
            places.write_manifest(self.path, manifest, self._rank)
        except Exception as error:  # broad: whatever goes wrong at the end of a recording must not end the run
            manifest.complete = False
            self._worker.fail(error)

    def abandon(self) -> None:
        """End where nothing was recorded: what was made is removed; a recording that was to be gone on with stays as it is."""
        if self._closed or self._foreign():
            return
        self._closed = True
        self._finalizer.detach()
        self._worker.finish()
        folder = places.rank_folder(self.path, self._rank)
        if self._goes_on:
            places.sign_off(folder)
        else:
            places.take_back([self.path, folder] if self._rank == 0 or self._world <= 1 else [folder])

    def _foreign(self) -> bool:
        return os.getpid() != self._pid

    def _put(self, item: _Item) -> bool:
        # A forked child has no writer thread, and its locks may be held for ever: look before touching any.
        if self._foreign():
            return False
        if not self._closed and self._worker.queue.put(item, item.size, hurries=not item.table):
            if self.blocked_seconds > _WAIT_TOLD and not self._slow_told:
                self._slow_told = True
                _log.warning(
                    "%s: the disk is slower than the run, which waits for it; record less, or elsewhere", self.path
                )
            return True
        self._worker.lost += item.rows
        return False


def _batch_size(batch: pa.RecordBatch, row_bytes: int) -> int:
    # A fair estimate: the exact size is looked up column by column, which takes longer than all else here.
    return 2048 + len(batch) * row_bytes


class _Worker:
    """The thread that writes, and what it writes with."""

    def __init__(self, folder: Path, pace: Pace, resumed: Resumed | None) -> None:
        self.failure: str | None = None
        self.lost = 0
        self._folder = folder
        self._pid = os.getpid()
        self._interval = pace.flush_interval
        self._enough = min(_BATCH_BYTES, max(pace.queue_limit // 4, 1))
        self.queue: BoundedQueue[_Item] = BoundedQueue(pace.queue_limit, self._enough)
        self._compactor = ThreadPoolExecutor(1, "tenterhook-compact")
        self._writers = {
            table: RowWriter(
                folder,
                table,
                schema,
                self._compactor,
                roll_bytes=pace.roll_bytes,
                number=0 if resumed is None else resumed.parts[table],
            )
            for table, schema in (("calls", CALLS), ("values", VALUES))
        }
        self._shards = ShardWriter(folder, shard_bytes=pace.shard_bytes, number=0 if resumed is None else resumed.shard)
        self._taken: deque[_Item] = deque()
        self._pending: dict[str, list[_Item]] = {"calls": [], "values": []}
        self._pending_size = 0
        self._due = float("inf")
        self._ending = False
        self.thread = threading.Thread(target=self._run, name="tenterhook-writer", daemon=True)
        self.thread.start()

    def finish(self, modules: pa.Table | None = None) -> None:
        """Write what is left and close the files; with `modules`, compact."""
        if os.getpid() != self._pid:
            return
        self._end_thread()
        try:
            if self.failure is None and modules is not None:
                for writer in self._writers.values():
                    writer.close()
                if self._shards.close():
                    write_index(self._folder, rank_files(self._folder, 0).shards)
        except Exception as error:  # broad: whatever goes wrong at the end of a recording must not end the run
            self.fail(error)
        if self.failure is not None or modules is None:
            self._stop_files()
        self._compactor.shutdown()
        if modules is not None:
            self._end_folder(modules)

    def break_off(self) -> None:
        """Write what is left after `finish` was interrupted, and sign off; nothing more is compacted."""
        self._end_thread()
        self._stop_files()
        self._compactor.shutdown(cancel_futures=True)
        places.sign_off(self._folder)

    def _end_thread(self) -> None:
        self._ending = True
        self.queue.put(_Item(""), 0)
        self.thread.join()
        self.lost += sum(item.rows for item in self.queue.shut())

    def fail(self, error: BaseException) -> None:
        """Stop: keep what is on the disk, take nothing more, remember why."""
        number = getattr(error, "errno", None)
        words = os.strerror(number) if number else f"{type(error).__name__}: {first_line(error)}"
        if self.failure is None:
            self.failure = f"writing stopped: {words}"
            _log.warning("%s: %s; the run goes on without being recorded", self._folder.parent, self.failure)
        left = [*self._taken, *self.queue.shut(), *self._pending["calls"], *self._pending["values"]]
        self._taken.clear()
        self._pending = {"calls": [], "values": []}
        self.lost += sum(item.rows for item in left)
        for item in left:
            if item.done is not None:
                item.done.set()

    def _run(self) -> None:
        try:
            ending = idle = False
            while not (ending and idle):
                ending = self._ending  # looked at before the queue, so that nothing put before it is left there
                wait = None if self._due == float("inf") else max(0.0, self._due - time.monotonic())
                idle = self._step(0 if ending else wait)
            self._write_rows()
        except Exception as error:  # broad: a fault of ours or of the disk ends the recording, never the run
            self.fail(error)
            self._stop_files()

    def _step(self, timeout: float | None) -> bool:
        """Deal with what is there; whether there was nothing."""
        self._taken.extend(self.queue.take(timeout))
        idle = not self._taken
        while self._taken:
            item = self._taken[0]
            if item.table == "tensors":
                self._shards.append(item.key, item.batch)
                self.queue.release(item.size)
                self._taken.popleft()
            elif item.table == "job":
                self._write_rows()
                item.batch()
                self._taken.popleft()
            elif item.table:
                self._pending[item.table].append(self._taken.popleft())
                self._pending_size += item.size
                self._due = min(self._due, time.monotonic() + self._interval)
                if self._pending_size >= self._enough:
                    self._write_rows()
            else:
                self._write_rows()
                self._taken.popleft()
                if item.done is not None:
                    item.done.set()
        if time.monotonic() >= self._due:
            self._write_rows()
        return idle

    def _write_rows(self) -> None:
        for table, items in self._pending.items():
            if items:
                self._writers[table].append([item.batch for item in items])
                self._pending[table] = []
                size = sum(item.size for item in items)
                self._pending_size -= size
                self.queue.release(size)
        self._due = float("inf")

    def _stop_files(self) -> None:
        for writer in self._writers.values():
            writer.stop()
        self._shards.stop()

    def _end_folder(self, modules: pa.Table) -> None:
        room = self._folder / places.RESERVE_NAME
        parts = (
            partial(room.unlink, missing_ok=True),
            partial(write_modules, self._folder, modules),
            partial(places.sign_off, self._folder),
        )
        for part in parts:
            try:
                part()
            except Exception as error:  # broad: as above
                self.fail(error)
