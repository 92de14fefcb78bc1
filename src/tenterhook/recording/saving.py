"""What a copy of a recording says of itself, and of the tensors that it cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from tenterhook.recording.manifest import Manifest
from tenterhook.recording.value import STALE

if TYPE_CHECKING:
    from tenterhook.recording.recording import Recording

__all__ = ["manifest_of_copy", "without_keys"]


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


def without_keys(values: pa.Table, stale: list[str]) -> pa.Table:
    """Take out the keys of tensors that are no longer what was seen, and say so."""
    column, note = values.column_names.index("tensor"), values.column_names.index("note")
    compute: Any = pc  # its functions are made at import, unseen by type checkers
    gone = compute.is_in(values["tensor"], value_set=pa.array(stale, pa.string()))
    keys = compute.if_else(gone, pa.scalar(None, pa.string()), values["tensor"])
    notes = compute.if_else(gone, pa.scalar(STALE), values["note"].cast(pa.string()))
    values = values.set_column(column, values.schema.field(column), keys)
    return values.set_column(note, values.schema.field(note), notes.cast(values.schema.field(note).type))
