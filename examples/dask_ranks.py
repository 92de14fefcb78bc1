"""Ask a recording of many ranks on many machines, with Dask: python examples/dask_ranks.py run.thk [SCHEDULER ADDRESS].

The files of a recording are plain Parquet in one folder for each rank, so any engine that reads Parquet reads them. Here each part
is a task that reads two or three columns of it; only counts and norms travel. Needs `pip install "dask[dataframe]" distributed`;
without an address everything runs on this machine.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow.parquet as pq

COLUMNS = ["step", "seq", "path", "kind", "rms", "numel", "nan_count", "posinf_count", "neginf_count"]


def read_part(part: Path) -> pd.DataFrame:
    """Read what is asked for of one file; the rank is in the name of its folder."""
    rows = pq.read_table(part, columns=COLUMNS).to_pandas()
    rows["path"] = rows["path"].astype("string[pyarrow]")
    rows["kind"] = rows["kind"].astype("string[pyarrow]")
    return rows.assign(rank=int(re.fullmatch(r"rank-(\d+)", part.parent.name)[1]))  # type: ignore[index]


def values(recording: Path) -> dd.DataFrame:
    """Give the values of all ranks as one data frame, a partition for each file."""
    parts = sorted(recording.glob("rank-*/values-*.parquet"))
    return dd.from_map(read_part, parts, meta=read_part(parts[0]).iloc[:0])


def first_non_finite(rows: Any) -> pd.DataFrame:
    """Give the first value of the whole run, over all ranks, that holds a NaN or an infinity."""
    bad = rows[(rows.nan_count > 0) | (rows.posinf_count > 0) | (rows.neginf_count > 0)]
    return bad[["step", "seq", "rank", "path", "kind"]].compute().sort_values(["step", "seq", "rank"]).head(1)


def norms(rows: Any) -> pd.Series:
    """Give the norm of each module's values over all ranks, by step and path."""
    squares = rows.assign(square=rows.rms**2 * rows.numel)
    return squares.groupby(["step", "path"]).square.sum().compute().pow(0.5).sort_index()


def main() -> None:
    """Ask the recording that is named on the command line."""
    if len(sys.argv) > 2:
        importlib.import_module("distributed").Client(sys.argv[2])
    else:
        dask.config.set(scheduler="threads")  # pyright: ignore[reportPrivateImportUsage]
    rows = values(Path(sys.argv[1]))
    print(first_non_finite(rows).to_string(index=False))
    print(norms(rows).to_string())


if __name__ == "__main__":
    main()
