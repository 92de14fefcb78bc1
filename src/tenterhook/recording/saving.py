"""What a copy of a recording says of itself, and of the tensors that it cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tenterhook.recording import converters
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.refused import not_kept, plain_array

if TYPE_CHECKING:
    from tenterhook.recording.recording import Recording
    from tenterhook.recording.writer import DiskSink

__all__ = ["manifest_of_copy", "store", "without_keys"]


def manifest_of_copy(recording: Recording, *, lost: int) -> Manifest:
    """Make the manifest of a copy; what the recording lacks, its copy lacks.

    Args:
        recording: the one that is copied.
        lost: number of tensors that rows name and that had not been stored.
    """
    copy = Manifest.from_json(recording.manifest.to_json())
    copy.rank = recording.ranks[0]
    reasons = [copy.partial, *recording.notes]
    if not copy.complete:
        state = "while it was being recorded" if recording.path is None else "though it was never closed"
        reasons.append(f"saved {state}, with {len(recording.steps)} steps so far")
        copy.steps = copy.steps or len(recording.steps)
    if lost and copy.tensors_stopped is None:
        reasons.append(f"{lost} tensors that rows name had not been stored")
    copy.partial = "; ".join(filter(None, reasons)) or None
    return copy


def store(sink: DiskSink, key: str, tensor: Any) -> str | None:
    """Write a tensor of a recording in memory; gives why that cannot be, where it cannot."""
    try:
        array = plain_array(converters.to_numpy(tensor))
    except Exception as refusal:  # broad: a class of tensors, which may be the user's, refuses in its own way
        return not_kept(tensor, refusal)
    sink.write_tensor(key, array)
    return None


def without_keys(values: pa.Table, notes: dict[str, str]) -> pa.Table:
    """Take out the keys of tensors that cannot be stored or are no longer what was seen, and say so.

    Args:
        values: rows of the table `values`.
        notes: key -> why.
    """
    column, note = values.column_names.index("tensor"), values.column_names.index("note")
    before = zip(values["tensor"].to_pylist(), values["note"].to_pylist(), strict=True)
    said = ["; ".join(filter(None, (old, notes[key]))) if key in notes else old for key, old in before]
    keys = [None if key in notes else key for key in values["tensor"].to_pylist()]
    values = values.set_column(column, values.schema.field(column), pa.array(keys, values.schema.field(column).type))
    return values.set_column(
        note, values.schema.field(note), pa.array(said, pa.string()).cast(values.schema.field(note).type)
    )
