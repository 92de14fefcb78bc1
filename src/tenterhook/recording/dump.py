"""All that is in a recording's directory, as lines of text: judge of the writer's tests, and a look at a damaged one.

Unlike `Recording`, it goes file by file and reports a damaged one in its place instead of stopping.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tenterhook._printable import printable
from tenterhook.errors import RecordingError
from tenterhook.recording.disk import DiskSource
from tenterhook.recording.files import RankFiles
from tenterhook.recording.parts import read_part
from tenterhook.recording.rows import MODULES_NAME
from tenterhook.recording.tensors import shard_entries

__all__ = ["dump"]


def dump(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield everything in a recording, one line for each row and tensor, nulls left out.

    Args:
        path: the directory.

    Raises:
        RecordingError: it is not a recording at all, or its manifest cannot be read.
    """
    source = DiskSource(Path(path), check=False)
    yield from (f"manifest {line}" for line in source.manifest.to_json().decode().splitlines())
    for files in source.files:
        yield f"rank {files.rank}"
        for table in ("calls", "values"):
            for part in (*files.parquet[table], *files.streams[table]):
                yield from _rows(part, table)
        modules = files.folder / MODULES_NAME
        if modules.exists():
            yield from _rows(modules, "modules")
        yield from _tensors(files)


def _rows(part: Path, table: str) -> Iterator[str]:
    try:
        rows = read_part(part, table)
    except (RecordingError, FileNotFoundError) as error:
        yield f"  DAMAGED {error}"
        return
    yield f"  {part.name}: {len(rows)} rows"
    for batch in rows.to_batches(max_chunksize=4096):
        yield from (f"    {_row(row)}" for row in batch.to_pylist())


def _row(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(item)}" for name, item in row.items() if item is not None)


def _short(item: Any) -> str:
    if isinstance(item, list) and len(item) > 8:
        return f"[{', '.join(f'{number:.6g}' for number in item[:3])}, ... {len(item)}]"
    return repr(item) if isinstance(item, str) else str(item)


def _tensors(files: RankFiles) -> Iterator[str]:
    for _, shard in sorted(files.shards.items()):
        try:
            entries = shard_entries(shard)
        except (RecordingError, FileNotFoundError) as error:
            yield f"  DAMAGED {error}"
            continue
        yield f"  {shard.name}: {len(entries)} tensors"
        for entry in entries:
            yield f"    {entry.key!r} {entry.dtype} {list(entry.shape)} bytes {entry.begin} to {entry.end}"


def main(arguments: Sequence[str]) -> int:
    """Print a dump; gives the exit code: 2 for a wrong call, 3 for what is no recording, or damaged anywhere."""
    if len(arguments) != 1:
        print("usage: python -m tenterhook.recording.dump NAME.thk", file=sys.stderr)
        return 2
    damaged = False
    try:
        for text in dump(arguments[0]):
            damaged = damaged or text.startswith("  DAMAGED ")
            print(printable(text))
    except RecordingError as error:
        print(f"tenterhook: {printable(str(error))}", file=sys.stderr)
        return 3
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 3 if damaged else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
