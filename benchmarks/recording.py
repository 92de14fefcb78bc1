"""What recording to disk and reading it back cost: rows, bytes, tensors, and questions to a very large recording.

    python -m benchmarks.recording rows      rows a second into the stream, bytes a row, the first non-finite value
    python -m benchmarks.recording numbers   what the summary and `tenterhook show` look for in the numbers, of a million values and calls
    python -m benchmarks.recording tensors   tensors to disk against plain file writing
    python -m benchmarks.recording memory    resident memory over 100,000 steps, with docs/pictures/recording-memory.svg
    python -m benchmarks.recording large     1,024 ranks x 300 modules x 100 steps; needs 3 GB of disk (--at FOLDER)

Each prints one JSON object a line; the machine is part of each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from tenterhook import record
from tenterhook.analysis.numbers import numbers_of
from tenterhook.recording import DiskSink, Manifest, open_recording
from tests.recording.synthetic import many_values, modules_table

NON_FINITE = """select rank, step, path, kind from values
where nan_count > 0 or posinf_count > 0 or neginf_count > 0 order by step, seq, rank limit 1"""
NORMS = "select step, path, sqrt(sum(rms * rms * numel)) as norm from values group by all order by step, path"
RANKS = """select path, count(*) as odd from (select step, path, digest, count(*) over (partition by step, path) as ranks,
count(*) over (partition by step, path, digest) as same from values where step % 10 = 0)
where same < ranks group by path order by odd desc limit 5"""


def say(**figures: object) -> None:
    """Print a line of figures."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(json.dumps({**figures, "machine": machine}, default=str), flush=True)


def timed(work: Callable[[], object], times: int = 15) -> dict[str, float]:
    """Give the milliseconds of some runs: the median by the clock, the least by the clock, and the least of the processor."""
    clock, cpu = [], []
    for _ in range(times):
        start, busy = time.perf_counter(), time.process_time()
        work()
        clock.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - busy) * 1e3)
    return {"median": statistics.median(clock), "least": min(clock), "cpu": min(cpu)}


def folder_bytes(path: Path) -> int:
    """Give the size of all files in a folder."""
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def rows(at: Path) -> None:
    """Measure rows into the stream and back."""
    for sketch in (False, True):
        for size in (300, 8192):
            batches = [many_values(size, first_step=step, sketch=sketch) for step in range(8)]
            path = at / f"rows-{sketch}-{size}.thk"
            manifest = Manifest()
            sink = DiskSink(path, manifest)
            count = 1_000_000 // size
            start, busy, own = time.perf_counter(), time.process_time(), time.thread_time()
            for index in range(count):
                sink.write_values(batches[index % 8])
            own = time.thread_time() - own
            sink.flush()
            streamed, busy = time.perf_counter() - start, time.process_time() - busy
            sink.close(manifest, modules_table())
            closed = time.perf_counter() - start
            say(
                what="rows",
                sketch=sketch,
                rows_per_batch=size,
                rows=count * size,
                rows_per_second_into_stream=int(count * size / streamed),
                rows_per_cpu_second=int(count * size / busy),
                caller_microseconds_a_row=own / count / size * 1e6,
                rows_per_second_with_compaction=int(count * size / closed),
                blocked_seconds=manifest.cost.blocked_seconds,
            )
            shutil.rmtree(path)
    path = at / "million.thk"
    sink = DiskSink(path, Manifest())
    for part in range(20):
        batch = many_values(50_000, first_step=part * 167)
        sink.write_values(with_nan(batch, 40_000) if part == 14 else batch)
    sink.close(Manifest(), modules_table())
    recording = open_recording(path)
    say(
        what="million",
        bytes_per_row=folder_bytes(path) / 1_000_000,
        first_non_finite_ms=timed(recording.first_nonfinite),
        first_non_finite_sql_ms=timed(lambda: recording.query(NON_FINITE)),
        one_layer_ms=timed(lambda: recording.query("select step, rms from values where path = 'layers.6.mlp'")),
        open_ms=timed(lambda: open_recording(path)),
    )


def numbers(at: Path) -> None:
    """Measure how long the numbers of a training's recording are looked through."""
    net = nn.Sequential(*[layer for _ in range(50) for layer in (nn.Linear(8, 8), nn.ReLU())])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with record(net, to=at / "training.thk"):
        for _ in range(5000):
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    found = open_recording(at / "training.thk")
    rows = {table: found.table(table).num_rows for table in ("calls", "values")}
    say(what="numbers", rows=rows, numbers_ms=timed(lambda: numbers_of(open_recording(at / "training.thk"))))


def tensors(at: Path) -> None:
    """Measure tensors to disk against plain writing of the same bytes, interleaved."""
    for shape, count in (((64, 197, 768), 24), ((32, 1024), 4000)):
        batch = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        ours, plain = [], []
        for turn in range(5):
            path = at / f"tensors-{turn}.thk"
            start = time.perf_counter()
            sink = DiskSink(path, Manifest())
            for index in range(count):
                sink.write_tensor(f"layer#{index}", batch)
            sink.close(Manifest(), modules_table())
            ours.append(time.perf_counter() - start)
            shutil.rmtree(path)
            start = time.perf_counter()
            with (at / "plain").open("wb", buffering=0) as file:
                for _ in range(count):
                    file.write(batch.data)
            plain.append(time.perf_counter() - start)
            (at / "plain").unlink()
        megabytes = batch.nbytes * count / 1e6
        say(
            what="tensors",
            shape=shape,
            count=count,
            megabytes=megabytes,
            ours_mb_per_second=megabytes / statistics.median(ours),
            plain_mb_per_second=megabytes / statistics.median(plain),
            ratio=statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True)),
        )


def resident() -> tuple[float, float]:
    """Give the memory of this process in MB: its own, and with the mapped files that the system may drop at any time."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1e3, int(status["VmRSS"].split()[0]) / 1e3


def memory(at: Path) -> None:
    """Follow the resident memory over 100,000 steps of 30 rows each."""
    sink = DiskSink(at / "memory.thk", Manifest())
    batches = [many_values(30, modules=30, first_step=step, sketch=True) for step in range(64)]
    points = []
    start = time.perf_counter()
    for step in range(100_000):
        sink.write_values(batches[step % 64])
        if step % 1000 == 999:
            points.append((step + 1, *resident()))
    sink.flush()
    seconds = time.perf_counter() - start
    sink.close(Manifest(), modules_table())
    halves = [points[:50], points[50:]]
    say(
        what="memory",
        steps=100_000,
        rows=3_000_000,
        seconds=seconds,
        median_mb_of_each_half=[statistics.median(own for _, own, _ in half) for half in halves],
        most_mb_of_each_half=[max(own for _, own, _ in half) for half in halves],
        most_mb_of_each_half_with_mapped_files=[max(whole for _, _, whole in half) for half in halves],
    )
    plot(points, Path(__file__).parents[1] / "docs" / "pictures" / "recording-memory.svg")


def plot(points: list[tuple[int, float, float]], target: Path) -> None:
    """Draw the memory over steps."""
    top = max(whole for _, _, whole in points) * 1.25

    def line(which: int, colour: str) -> str:
        places = " ".join(
            f"{60 + point[0] / 100_000 * 620:.1f},{260 - point[which] / top * 230:.1f}" for point in points
        )
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'

    marks = "".join(
        f'<text x="52" y="{264 - level / top * 230:.0f}" text-anchor="end">{level}</text>'
        f'<path d="M60 {260 - level / top * 230:.1f}H680" stroke="#ddd"/>'
        for level in range(0, int(top) + 1, 100)
    )
    steps = "".join(
        f'<text x="{60 + step / 100_000 * 620:.0f}" y="280" text-anchor="middle">{step:,}</text>'
        for step in range(0, 100_001, 25_000)
    )
    target.parent.mkdir(exist_ok=True)
    target.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 310" font-family="sans-serif" font-size="12">'
        f'<rect width="720" height="310" fill="#fff"/>{marks}{steps}{line(2, "#bbb")}{line(1, "#c33")}'
        '<text x="370" y="302" text-anchor="middle">steps recorded</text>'
        '<text x="14" y="16">memory of the process, MB (grey: with mapped files)</text></svg>\n'
    )


def large(at: Path, ranks: int) -> None:
    """Write a recording of many ranks, and ask it in a process of its own, whose memory is then known."""
    path = at / "large.thk"
    start = time.perf_counter()
    for rank in range(ranks):
        if (path / f"rank-{rank:05d}" / "modules.parquet").exists():
            continue
        manifest = Manifest(rank=rank, world=ranks)
        sink = DiskSink(path, manifest, rank=rank)
        batch = many_values(30_000, rank=rank)
        if rank == ranks // 2:
            batch = with_nan(batch, row=20_000)
        sink.write_values(batch)
        sink.close(manifest, modules_table())
    say(what="large written", ranks=ranks, seconds=time.perf_counter() - start, gigabytes=folder_bytes(path) / 1e9)
    subprocess.run([sys.executable, "-m", "benchmarks.recording", "ask", "--at", str(path)], check=True)


def with_nan(batch: pa.RecordBatch, row: int) -> pa.RecordBatch:
    """Give the batch with one value that holds a NaN."""
    counts = batch.column("nan_count").to_numpy().copy()
    counts[row] = 1
    place = batch.schema.get_field_index("nan_count")
    return batch.set_column(place, batch.schema.field(place), pa.array(counts))


def ask(path: Path) -> None:
    """Open a large recording and ask it."""
    start = time.perf_counter()
    recording = open_recording(path)
    opened = time.perf_counter() - start
    figures: dict[str, object] = {"what": "large asked", "open_seconds": opened}
    start, busy = time.perf_counter(), time.process_time()
    figures["first_nonfinite"] = repr(recording.first_nonfinite())
    figures["first_nonfinite_seconds"] = time.perf_counter() - start
    figures["first_nonfinite_cpu_seconds"] = time.process_time() - busy
    for name, sql in (("first_non_finite_sql", NON_FINITE), ("norms", NORMS), ("ranks_that_differ", RANKS)):
        start, busy = time.perf_counter(), time.process_time()
        answer = recording.query(sql)
        figures[f"{name}_seconds"] = time.perf_counter() - start
        figures[f"{name}_cpu_seconds"] = time.process_time() - busy
        figures[f"{name}_rows"] = answer.num_rows
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say(**figures)


def main() -> None:
    """Run the benchmark that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rows", "numbers", "tensors", "memory", "large", "ask"])
    parser.add_argument("--at", type=Path, help="folder to write to; a temporary one by default")
    parser.add_argument("--ranks", type=int, default=1024)
    options = parser.parse_args()
    if options.what == "ask":
        ask(options.at)
        return
    at = options.at or Path(tempfile.mkdtemp(prefix="tenterhook-"))
    at.mkdir(parents=True, exist_ok=True)
    try:
        large(at, options.ranks) if options.what == "large" else globals()[options.what](at)
    finally:
        if options.at is None:
            shutil.rmtree(at)


if __name__ == "__main__":
    main()
