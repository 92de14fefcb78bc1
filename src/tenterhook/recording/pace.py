"""How often, and in what portions, a recording is written to disk."""

from __future__ import annotations

from dataclasses import dataclass

from tenterhook.recording.rows import ROLL_BYTES
from tenterhook.recording.shards import SHARD_BYTES

__all__ = ["USUAL", "Pace"]

QUEUE_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class Pace:
    """How often, and in what portions, a recording is written.

    Attributes:
        flush_interval: seconds after which rows are written at the latest.
        queue_limit: bytes that may wait in memory.
        roll_bytes: size at which a stream is turned into Parquet.
        shard_bytes: size at which a new shard of tensors begins.
    """

    flush_interval: float = 1.0
    queue_limit: int = QUEUE_LIMIT
    roll_bytes: int = ROLL_BYTES
    shard_bytes: int = SHARD_BYTES


USUAL = Pace()
