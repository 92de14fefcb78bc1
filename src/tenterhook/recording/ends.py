"""How far the rows of a rank go, told from a few of their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from tenterhook.recording.files import RankFiles, part_number
from tenterhook.recording.parts import parquet_rows, read_part

pc: Any = pyarrow.compute  # its functions are made at import, out of a type checker's sight

__all__ = ["all_parts", "ends_of", "part_columns", "step_reached"]


def all_parts(files: RankFiles, table: str) -> list[Path]:
    """List the parts of a table in order, finished or not."""
    return sorted([*files.parquet[table], *files.streams[table]], key=part_number)


def part_columns(part: Path, table: str, names: list[str]) -> pa.Table:
    """Read some columns of a part.

    Raises:
        RecordingError: it is damaged.
    """
    return parquet_rows(part, table, names, None) if part.suffix == ".parquet" else read_part(part, table).select(names)


def ends_of(files: RankFiles, table: str) -> dict[str, int]:
    """Find the greatest step, seq and start_ns of a table; -1 where there is none.

    Raises:
        RecordingError: a part is damaged.
    """
    names = ["step", "seq", *(["start_ns"] if table == "calls" else [])]
    ends = dict.fromkeys(names, -1)
    for part in all_parts(files, table):
        rows = part_columns(part, table, names)
        for name in names:
            ends[name] = max(ends[name], pc.max(rows[name]).as_py() if len(rows) else -1)
    return ends


def step_reached(ends: dict[str, dict[str, int]]) -> int:
    """Give the last step of which both tables have rows; whether it is whole cannot be told from them.

    Without a value at all (gradients that never came) the calls alone tell how far it went.
    """
    return max(0, min(end["step"] for table, end in ends.items() if table == "calls" or end["step"] >= 0))
