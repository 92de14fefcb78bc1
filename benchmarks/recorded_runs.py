"""What writing to disk costs a real run, in turns within one process.

    python -m benchmarks.recorded_runs loader    one layer's outputs to disk, against the bare forward and against writing plain files
    python -m benchmarks.recorded_runs writing   training steps recorded to disk, against the same recorded in memory

    python -m benchmarks.recorded_runs memory    resident memory over 100,000 steps, with docs/pictures/recorded-run-memory.svg

    python -m benchmarks.recorded_runs page FILE...   what these have printed, into docs/format.md

Each prints one JSON object a line; the machine and its load are part of each.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import nn

import tenterhook as th
from benchmarks.models import build
from benchmarks.overhead import forward
from benchmarks.recording import folder_bytes, plot, resident, say

LAYERS = {"transformer": "6", "resnet": "blocks.1", "small_cnn": "3", "alexnet": "3.4"}


def clock(work: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Give the seconds that some work takes, by the clock and of the processor, all threads together."""
    start, busy = time.perf_counter(), time.process_time()
    work(*arguments)
    return time.perf_counter() - start, time.process_time() - busy


def times(count: int, work: Callable[..., object], *arguments: object) -> None:
    """Do some work again and again."""
    for _ in range(count):
        work(*arguments)


def loader(at: Path, rounds: int) -> None:
    """Store one layer's outputs of many batches in three ways: not at all, as a loop with a hook and a file does, and with us."""
    for name, layer in LAYERS.items():
        net, x = build(name)
        net.eval()
        forward(net, x)
        steps = max(4, int(1 / clock(forward, net, x)[0]))
        taken: dict[str, list[tuple[float, float]]] = {"bare": [], "plain": [], "ours": [], "ours_in_float16": []}
        for turn in range(rounds + 1):
            for way, spent in taken.items():
                seconds = clock(_store, way, net, x, layer, steps, at)
                if turn:  # the first warms up
                    spent.append(seconds)
                shutil.rmtree(at / "a.thk", ignore_errors=True)
        with th.record(net, layer, kinds=["output"]) as rec:
            forward(net, x)
        (shape,) = rec.table("values")["shape"].to_pylist()
        pairs = (("plain", "bare"), ("ours", "bare"), ("ours", "plain"), ("ours_in_float16", "bare"))
        say(
            what="loader", model=name, layer=layer, batches=steps, rounds=rounds,
            megabytes_a_batch=math.prod(shape) * 4 / 1e6,
            forward_cpu_ms=statistics.median(cpu for _, cpu in taken["bare"]) / steps * 1e3,
            **{f"{one}_to_{other}": _ratios(taken[one], taken[other]) for one, other in pairs},
        )  # fmt: skip


def _ratios(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> dict[str, float]:
    """Give the medians of the ratios, turn by turn."""
    turns = list(zip(ours, theirs, strict=True))
    return {
        name: round(statistics.median(one[which] / other[which] for one, other in turns), 3)
        for which, name in enumerate(("clock", "cpu"))
    }


def _store(way: str, net: nn.Module, x: torch.Tensor, layer: str, steps: int, at: Path) -> None:
    if way == "bare":
        for _ in range(steps):
            forward(net, x)
    elif way == "plain":
        with (at / "plain").open("wb", buffering=0) as file:
            hook = net.get_submodule(layer).register_forward_hook(
                lambda module, args, output: file.write(output.contiguous().numpy().data) and None
            )
            for _ in range(steps):
                forward(net, x)
            hook.remove()
        (at / "plain").unlink()
    else:
        dtype = "float16" if way.endswith("16") else None
        with th.record(net, layer, kinds=["output"], tensors=True, tensors_dtype=dtype, stats=None, to=at / "a.thk"):
            for _ in range(steps):
                forward(net, x)


def train(net: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make a step on input that never comes again."""
    optimizer.zero_grad()
    net(torch.randn_like(x)).square().mean().backward()
    optimizer.step()


def writing(at: Path, rounds: int) -> None:
    """Train on ever new input with a recording of everything, in memory and on disk in turn; then weigh what is on the disk.

    Two figures say what writing adds. The one compares turn with turn; other work on the machine is in it. The other is the
    processor time of the threads that write, and of closing, against that of the whole turn.
    """
    for name in ("resnet", "transformer", "alexnet", "small_cnn", "tiny401", "tiny2001"):
        net, x = build(name)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        train(net, x, optimizer)
        once = clock(train, net, x, optimizer)[0]
        steps = max(6, int(2 / once))
        taken: dict[str, list[_Turn]] = {"memory": [], "disk": []}
        for turn in range(rounds + 1):
            for way in ("memory", "disk") if turn % 2 else ("disk", "memory"):
                if way == "disk":
                    shutil.rmtree(at / "b.thk", ignore_errors=True)
                one = _recorded(net, x, optimizer, steps, {"to": at / "b.thk"} if way == "disk" else {})
                if turn:  # the first warms up
                    taken[way].append(one)
        memory, disk = ([one.spent for one in taken[way]] for way in ("memory", "disk"))
        parts = list((at / "b.thk").rglob("*.parquet"))
        rows = sum(pq.read_metadata(part).num_rows for part in parts if part.name.startswith(("calls", "values")))
        sketches = sum(_column_bytes(part, "sketch") for part in parts if part.name.startswith("values"))
        say(
            what="writing", model=name, steps=steps, rounds=rounds, step_ms=once * 1e3, rows=rows,
            disk_to_memory=_ratios(disk, memory),
            writing_threads=statistics.median(one.threads / one.spent[1] for one in taken["disk"]),
            closing=statistics.median(one.closing / one.spent[1] for one in taken["disk"]),
            bytes_a_row=(folder_bytes(at / "b.thk") - sketches) / rows, sketch_bytes_a_row=sketches / rows,
        )  # fmt: skip


@dataclass
class _Turn:
    """A recorded run.

    Attributes:
        spent: seconds of its steps, by the clock and of the processor, all threads together.
        threads: seconds of the processor that the threads which write took of that.
        closing: seconds of the processor that came after the steps.
    """

    spent: tuple[float, float]
    threads: float
    closing: float


def _recorded(
    net: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int, options: dict[str, Any]
) -> _Turn:
    session: AbstractContextManager[Any] = th.record(net, **options)
    with session:
        train(net, x, optimizer)
        before = _threads()
        spent = clock(times, steps, train, net, x, optimizer)
        threads = _threads() - before
        start = time.process_time()
    return _Turn(spent, threads, time.process_time() - start)


def _threads() -> float:
    """Give the seconds of the processor that our threads have taken so far."""
    ours = (thread.ident for thread in threading.enumerate() if thread.name.startswith("tenterhook-"))
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in ours if ident is not None)


def _column_bytes(part: Path, column: str) -> int:
    meta = pq.read_metadata(part)
    chunks = (
        meta.row_group(group).column(at) for group in range(meta.num_row_groups) for at in range(meta.num_columns)
    )
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.startswith(column + "."))


def memory(at: Path, rounds: int) -> None:
    """Follow the resident memory of a training of 100,000 steps that is recorded whole; the rounds say nothing here."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(4, 8)
    points = []
    with th.record(net, to=at / "memory.thk") as recorder:
        for step in range(1, 100_001):
            train(net, x, optimizer)
            if step % 1000 == 0:
                points.append((step, *resident()))
    halves = [points[10:55], points[55:]]
    say(
        what="memory of a run", steps=100_000,
        rows=sum(recorder.table(name).num_rows for name in ("calls", "values")),
        median_mb_of_each_half=[statistics.median(own for _, own, _ in half) for half in halves],
        most_mb_of_each_half=[max(own for _, own, _ in half) for half in halves],
    )  # fmt: skip
    plot(points, Path(__file__).parents[1] / "docs" / "pictures" / "recorded-run-memory.svg")


def page(printed: list[Path]) -> None:
    """Put what was printed into the table of the page on the format."""
    lines = ["| what | against | ratio |", "|---|---|---|"]
    for figures in (json.loads(line) for file in printed for line in file.read_text().splitlines()):
        machine = figures["machine"].rpartition(", ")[2]
        if figures["what"] == "loader":
            layer = (
                f"`{figures['layer']}` of {figures['model']}, {figures['megabytes_a_batch']:.2g} MB a batch ({machine})"
            )
            for ways in ("ours to bare", "ours to plain", "ours_in_float16 to bare", "plain to bare"):
                one, _, other = ways.partition(" to ")
                found = figures[f"{one}_to_{other}"]
                who = {
                    "ours": "stored",
                    "plain": "a hook that writes a plain file",
                    "ours_in_float16": "stored in float16",
                }[one]
                against = {"bare": "bare forward", "plain": "a hook that writes a plain file"}[other]
                lines.append(f"| {layer}: {who} | {against} | {found['cpu']:.2f} ({found['clock']:.2f}) |")
        else:
            found = figures["disk_to_memory"]
            what = (
                f"{figures['model']}, {figures['rows']} rows, all outputs and gradients ({machine}): recorded to disk"
            )
            lines.append(f"| {what} | recorded in memory | {found['cpu']:.2f} ({found['clock']:.2f}) |")
            threads, closing = figures["writing_threads"], figures["closing"]
            lines.append(f"| … the threads that write, and closing | the whole run | {threads:.3f} + {closing:.3f} |")
            size = f"{figures['bytes_a_row']:.0f} bytes, sketches {figures['sketch_bytes_a_row']:.0f} more"
            lines.append(f"| … a row on disk | | {size} |")
    place = Path(__file__).parents[1] / "docs" / "format.md"
    before, mark, rest = place.read_text().partition("<!-- recorded_runs -->\n")
    table = "\n".join(lines)
    place.write_text(f"{before}{mark}{table}\n{rest[rest.index('<!-- end -->') :]}")


def main() -> None:
    """Run the benchmark that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loader", "writing", "memory", "page"])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "page":
        page(arguments.files)
        return
    torch.set_num_threads(arguments.threads)
    at = Path(tempfile.mkdtemp(prefix="tenterhook-"))
    try:
        {"loader": loader, "writing": writing, "memory": memory}[arguments.what](at, arguments.rounds)
    finally:
        shutil.rmtree(at)


if __name__ == "__main__":
    main()
