"""Where the recorder puts what it saw: the left side of a recording."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from tenterhook.recording.manifest import Manifest

__all__ = ["Sink"]


@runtime_checkable
class Sink(Protocol):
    """Takes rows and tensors in, in the order in which they happened.

    A sink never raises because of what happens on the far side (a full disk): it stops, says why in `failure`, and
    counts what it lost, so that a recording never ends a training.
    """

    @property
    def failure(self) -> str | None:
        """Why the sink stopped storing; None while all is well."""
        ...

    def write_calls(self, batch: pa.RecordBatch) -> None:
        """Take rows of the schema `CALLS`."""
        ...

    def write_values(self, batch: pa.RecordBatch) -> None:
        """Take rows of the schema `VALUES`."""
        ...

    def write_tensor(self, key: str, tensor: Any) -> bool:
        """Take a tensor, which belongs to the sink from now on (no copy is made).

        Args:
            key: what the column `tensor` of the value's row says.
            tensor: an ndarray, of ml_dtypes too; a sink in memory takes any object.

        Returns:
            Whether it will be stored.
        """
        ...

    def steps_ended(self, before: int) -> None:
        """Note that the steps before this one are whole: all their rows have been handed over."""
        ...

    def describe(self, manifest: Manifest) -> None:
        """Take in what is known by now of the recording, which may not come to be closed."""
        ...

    def flush(self) -> None:
        """Return when all that was handed over is where the sink puts it."""
        ...

    def close(self, manifest: Manifest, modules: pa.Table) -> None:
        """Finish: nothing is written after this. A second call does nothing.

        Args:
            manifest: the finished manifest.
            modules: rows of the schema `MODULES`.
        """
        ...

    def break_off(self, manifest: Manifest) -> None:
        """End at once, unfinished, since whoever ends it has been interrupted; after `close` it does nothing."""
        ...

    def abandon(self) -> None:
        """End where nothing was recorded, since the session could not begin: what the sink made is taken away again."""
        ...
