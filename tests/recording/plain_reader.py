"""A reader of recordings by docs/format.md alone: JSON, pyarrow and NumPy, nothing of tenterhook. Judge of page and writer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MAJOR = 1
PART = re.compile(r"(calls|values)-(\d+)\.(parquet|arrows)")
SHARD = re.compile(r"tensors-(\d+)\.safetensors(\.part)?")
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def manifest(folder: Path) -> dict[str, Any]:
    """Give `recording.json`; of several ranks with `complete` for all."""
    found = json.loads((folder / "recording.json").read_text())
    major = int(found["format_version"].split(".")[0])
    if major > MAJOR:
        raise ValueError(f"{folder} is of format {major}, this reader knows {MAJOR}")
    if found.get("world", 1) > 1:
        ranks = [json.loads(file.read_text()) for file in folder.glob("rank-*/recording.json")]
        found["complete"] = len(ranks) == found["world"] and all(one.get("complete", False) for one in ranks)
    return found


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Give the rows of `calls` or `values` of all ranks, each with its `rank`."""
    found = []
    for rank in sorted(folder.glob("rank-*")):
        parts: dict[int, Path] = {}
        for file in rank.iterdir():
            match = PART.fullmatch(file.name)
            if match and match[1] == table and (match[3] == "parquet" or int(match[2]) not in parts):
                parts[int(match[2])] = file
        for _, file in sorted(parts.items()):
            read = pq.read_table(file) if file.suffix == ".parquet" else stream(file)
            found += [{**row, "rank": int(rank.name[5:])} for row in read.to_pylist()]
    return found


def stream(file: Path) -> pa.Table:
    """Give the whole batches of a stream; what follows is passed over."""
    batches: list[pa.RecordBatch] = []
    if not file.stat().st_size:
        return pa.table({})
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_stream(source)
            while True:
                batch = reader.read_next_batch()
                batch.validate(full=True)
                batches.append(batch)
        except (StopIteration, pa.ArrowInvalid, OSError):
            pass
    return pa.Table.from_batches(batches) if batches else pa.table({})


def tensors(rank: Path) -> dict[str, np.ndarray]:
    """Give the stored tensors of one rank's folder, by key."""
    shards: dict[int, Path] = {}
    for file in rank.iterdir():
        match = SHARD.fullmatch(file.name)
        if match and (not match[2] or int(match[1]) not in shards):
            shards[int(match[1])] = file
    if (rank / "tensors.parquet").exists():
        index = pq.read_table(rank / "tensors.parquet").to_pylist()
        places = [
            (shards[row["shard"]], *(row[name] for name in ("key", "dtype", "shape", "begin", "end"))) for row in index
        ]
    else:
        places = [(file, *entry) for file in shards.values() for entry in entries(file)]
    return {place[1]: tensor(*place) for place in places}


def entries(file: Path) -> list[tuple[str, str, list[int], int, int]]:
    """Give key, dtype, shape, begin and end of each tensor in a shard: by its header, or by its journal while it grows."""
    if file.suffix == ".part":
        journal = file.with_name(file.name.removesuffix(".safetensors.part") + ".jsonl")
        lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
        return [tuple(json.loads(line)) for line in lines]
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = header.pop("__metadata__", {})
    found = []
    for key, described in header.items():
        begin, end = (8 + length + offset for offset in described["data_offsets"])
        shape = described["shape"][:-1] if key in names else described["shape"]
        found.append((key, names.get(key, described["dtype"]), shape, begin, end))
    return found


def tensor(file: Path, key: str, dtype: str, shape: list[int], begin: int, end: int) -> np.ndarray:
    """Give one tensor; of a dtype that NumPy lacks, its bytes."""
    raw = file.read_bytes()[begin:end]
    try:
        kind = np.dtype(DTYPES.get(dtype, dtype))
    except TypeError:
        return np.frombuffer(raw, np.uint8)
    return np.frombuffer(raw, kind).reshape(shape)
