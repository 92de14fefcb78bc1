"""Runs the benchmarks and writes ``docs/performance.md``: ``make benchmarks``.

    python -m benchmarks.performance [--rounds 5] [--steps 100000] [--seconds 0.5]
    python -m benchmarks.performance --only writing,kernel    measures these parts anew; the others stay on the page as they are

Each part runs in a process of its own, and says when it was measured. Nothing in the page is written by hand, but for the words.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.overhead import MORE
from tenterhook.native import CALLS
from tenterhook.stats import KERNEL

PARTS = ("overhead", "writing", "bounds", "reads", "peers", "scaling", "kernel")
"""The parts of the page, in order."""

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TARGETS: dict[tuple[str, str, str], float] = {
    ("forward", "outputs: statistics, sketch", "resnet"): 1.08,
    ("forward", "outputs: statistics, sketch", "transformer"): 1.08,
    ("forward", "outputs: statistics, sketch", "alexnet"): 1.03,
    ("forward", "outputs: statistics, sketch", "small_cnn"): 1.12,
    ("forward", "outputs: statistics, sketch", "tiny401"): 1.7,
    ("forward", "order and shapes", "tiny401"): 1.6,
    ("forward", "all, every 10th step", "tiny401"): 1.08,
    ("forward", "all, steps between", "tiny401"): 1.0,
    ("forward and backward", "all: outputs and gradients", "resnet"): 1.10,
    ("forward and backward", "all: outputs and gradients", "transformer"): 1.08,
    ("forward and backward", "all: outputs and gradients", "alexnet"): 1.05,
    ("forward and backward", "all: outputs and gradients", "small_cnn"): 1.15,
    ("forward and backward", "all: outputs and gradients", "tiny401"): 1.8,
}
"""What we want, by what is timed, what is recorded and the network."""

_WRITING = 1.03
"""What we want of writing, as a ratio to recording in memory."""

_WRITTEN = 4
"""Turns on disk in each process."""

_EACH_STEP = {"forward": "outputs: statistics, sketch", "forward and backward": "all: outputs and gradients"}
"""What `every=10` records, on each step."""

_OF_SIZE = {
    "bare, µs a call": ("bare_us", 1),
    "forward, ratio": ("ratio", 2),
    "added, µs a call": ("added_us", 1),
    "two hooks that measure, added, µs a call": ("bound_us", 1),
    "attaching, µs a module": ("attach_us", 0),
    "without Python's garbage collector": ("attach_alone_us", 0),
}
"""What is said of a network's size, by the name in the benchmark's output, with how many digits."""

INTRODUCTION = """\
# Performance

What a recording costs, measured by `make benchmarks`, which writes this page. Figures are ratios to the bare run: a run
without, one with and one without the recording take turns in one process, and the median over the rounds is given.
The row *nothing* is the bare run against itself: what differs from 1 there is the machine, and no other figure is better
than that. A target stands in brackets after the figure, in bold where it is missed. One thread of torch; opening and
closing a session are not in the figures. The allocator keeps the memory that tensors give back: else a step has thousands of
page faults or none, as the addresses happen to lie in a session, bare as recorded, and that is more than a recording costs.

Networks: `alexnet` (25 calls of modules, 4 x 3 x 224 x 224), `small_cnn` (MNIST size, batch 32), `transformer` (12 layers of
width 256, 4 x 128 tokens), `resnet` (ResNet-18-like, 4 x 3 x 112 x 112), `tiny401` (400 modules of 8 numbers each: nothing
but the cost of a call), `tiny2001` (2,000 of them). *Forward* is without gradients (`torch.no_grad`), *forward and backward* a step of
training without its optimizer. The digest goes with the statistics.
"""

BUSY = (
    "**The machine was busy**: more processes wanted to run than it has cores. Differences of a fifth mean nothing in the"
    " tables, and the microseconds are too many; run `make benchmarks` again on a quiet one."
)


def run(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark in a process of its own and read the JSON objects that it prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def machine() -> Iterator[str]:
    """Yield what all figures of a page hold for."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "pyarrow"))
    yield (
        f"Measured on {platform.machine()}, "
        f"{names[0].partition(':')[2].strip() if names else platform.processor()}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, {versions}; kernel: {KERNEL}; plain calls: {CALLS} code."
    )
    yield ""


def overhead(rounds: int, models: str) -> Iterator[str]:
    """Yield the tables of what recording costs on each network."""
    found = run("overhead", "--json", "--rounds", str(rounds), "--models", models)
    names = models.split(",")
    for work in dict.fromkeys(one["work"] for one in found):
        yield f"## What recording costs: {work}"
        yield ""
        rows = []
        for variant in dict.fromkeys(one["what"] for one in found if one["work"] == work):
            by_model = {one["model"]: one for one in found if (one["work"], one["what"]) == (work, variant)}
            rows.append([variant, *(_cell(work, variant, name, by_model[name]["ratio"]) for name in names)])
        yield from table(["recorded", *names], rows)
        added = [one for one in found if one["work"] == work and one["model"] == "tiny401"]
        yield "Added for each call of a module, `tiny401`: "
        yield "; ".join(f"{one['what']} {one['added_us']:.1f} µs" for one in added) + "."
        yield ""
        every = [one["ratio"] for one in added if one["what"] == _EACH_STEP[work]]
        if every:
            yield (
                f"Of ten steps with one recorded, a tenth of what a recorded step adds is the least that can be added, here"
                f" {1 + (every[0] - 1) / 10:.2f}. The rest is the hooks' going on and off, and that what they use has gone cold in"
                " the processor's caches meanwhile. On the steps between, the calls of the root are counted, by"
                f" {CALLS} code, and nothing else is on."
            )
            yield ""


def _cell(work: str, variant: str, model: str, ratio: float) -> str:
    target = TARGETS.get((work, variant, model))
    if target is None:
        return f"{ratio:.2f}"
    return f"**{ratio:.2f} ({target:.2f})**" if round(ratio, 2) > target else f"{ratio:.2f} ({target:.2f})"


def writing(rounds: int, models: str) -> Iterator[str]:
    """Yield the table of what writing adds."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for name in models.split(","):
        command = ("overhead", "--written", "--rounds", str(_WRITTEN), "--models", name)
        first = run(*command)
        processes = rounds * (MORE if all(one["short"] for one in first) else 1)
        for one in [*first, *(one for _ in range(processes - 1) for one in run(*command))]:
            found.setdefault((one["work"], one["what"], name), []).extend(one["ratios"])
    yield "## What writing adds"
    yield ""
    yield (
        "All outputs and gradients recorded to disk, against the same recorded in memory: turns of more than a second, each set"
        " against the mean of the turns before and after it. The control is a turn in memory, set against the turns in memory"
        f" before and after it. {rounds} processes for each network, {rounds * MORE} where a step is short, with"
        f" {_WRITTEN} turns on disk and {_WRITTEN - 1} of the control each: with tiny modules the turns of one process drift by some"
        " hundredths, and so do processes. Medians, and quartiles in brackets. Target:"
        f" {_WRITING:.2f}. Closing, which turns what is left into Parquet, is not in it."
    )
    yield ""
    names = models.split(",")
    rows = []
    for work, way in dict.fromkeys((work, way) for work, way, _ in found):
        rows.append([f"{work}: {way}", *(_spread(found[work, way, name], "control" not in way) for name in names)])
    yield from table(["", *names], rows)


def _spread(ratios: list[float], has_target: bool) -> str:
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    cell = f"{median:.2f} ({low:.2f}-{high:.2f})"
    return f"**{cell}**" if has_target and round(median, 2) > _WRITING else cell


def bounds(rounds: int) -> Iterator[str]:
    """Yield the table of what bounds the cost of a call."""
    found = run("bounds", "--rounds", str(rounds))
    yield "## What bounds the cost of a call"
    yield ""
    bare = found[0]["bare_us"]
    yield (
        f"On `tiny401`, where a bare call takes {bare:.1f} µs forward, what records nothing: put on through torch's own"
        " registration of hooks, or, in the first row, in the place around a module's call that a recording takes where there are"
        " no other hooks. The targets were set on a machine whose bare call took 9.3 µs: a ratio of 1.60 left 5.6 µs for a call"
        f" there and leaves {0.6 * bare:.1f} µs here."
    )
    yield ""
    rows = [[one["work"], one["what"], f"{one['ratio']:.2f}", f"{one['added_us']:.1f}"] for one in found]
    yield from table(["timed", "what", "ratio", "µs a call"], rows)


def reads(rounds: int, models: str) -> Iterator[str]:
    """Yield the table of what the reading of real networks' tensors takes."""
    found = run("reads", "--rounds", str(rounds), "--models", models)
    sizes = {one["model"]: one for one in found if "outputs" in one}
    yield "## What bounds the cost on real networks"
    yield ""
    yield (
        "Forward; ratios to the bare step. Hooks of torch's that do nothing else hand what each module gives, as soon as it is"
        " written, to a pure read of its bytes or to the kernel; what the same hooks take with nothing in them is subtracted and"
        " stands in a row of its own. Read it downwards: no statistics can cost less than the read, and no recording less than the"
        " kernel's row for what it takes (the digest goes with the statistics); what the rows of tenterhook have beyond that is the"
        " way to the tensor and the row's other columns. Two rows that differ by a hundredth or two do not differ on this machine."
    )
    yield ""
    rows = [["outputs, MB a step", *(f"{one['outputs']}, {one['mb']:.0f}" for one in sizes.values())]]
    for what in dict.fromkeys(one["what"] for one in found if "what" in one):
        figures = {one["model"]: one["ratio"] for one in found if one.get("what") == what}
        rows.append([what, *(f"{figures[name]:.3f}" for name in sizes)])
    yield from table(["", *sizes], rows)


def peers(rounds: int, models: str) -> Iterator[str]:
    """Yield the table of what others cost."""
    versions, *found = run("peers", "--rounds", str(rounds), "--models", models)
    names = models.split(",")
    yield "## Beside others, forward"
    yield ""
    yield (
        "Every module's output, and what each does for every run is in its figure (tenterhook's hooks stay on). They are not alike:"
        " TorchLens follows every operation, nnsight runs a program of its user's beside the model, hooks as baukit puts them on keep"
        " references, those written by hand compute nine numbers with torch's reductions. Versions: "
        + (", ".join(f"{name} {version}" for name, version in versions["versions"].items()) or "none installed")
        + "."
    )
    yield ""
    rows = []
    for what in dict.fromkeys(one["what"] for one in found):
        figures = {one["model"]: one["figure"] for one in found if one["what"] == what}
        rows.append([what, *(f if isinstance(f := figures[name], str) else f"{f[0]:.2f}" for name in names)])
    yield from table(["", *names], rows)


def scaling(rounds: int, steps: int) -> Iterator[str]:
    """Yield the tables of growth with modules and steps."""
    yield "## Growth"
    yield ""
    rows = [
        [f"{one['modules']:,}", *(f"{one[name]:.{digits}f}" for name, digits in _OF_SIZE.values())]
        for one in run("scaling", "modules", "--rounds", str(rounds))
    ]
    yield from table(["tiny modules", *_OF_SIZE], rows)
    yield (
        "With some thousands of modules neither they nor what belongs to them fit into the processor's caches of a core: a call takes"
        " longer bare, and so does what is added, by a recording as by two plain hooks that write nothing down."
    )
    yield ""
    rows = [
        [f"{one['steps']:,}", f"{one['us_a_step']:.0f}", f"{one['mb']:.0f}"]
        for one in run("scaling", "steps", "--steps", str(steps))
    ]
    yield from table(["training steps recorded to disk", "µs a step", "resident MB"], rows)


def kernel(seconds: float) -> Iterator[str]:
    """Yield the kernel's own table, as it prints it."""
    command = [sys.executable, "-m", "benchmarks.kernel", "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    yield "## The kernel against a read of the same bytes"
    yield ""
    yield "Targets with statistics and sketch, without the digest: 6x at 64 K, 3x at 1 M, 1.7x at 8 M elements."
    yield ""
    yield "```text"
    yield done.stdout.rstrip()
    yield "```"
    yield ""


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description="Run the benchmarks and write docs/performance.md.")
    parser.add_argument("--rounds", type=int, default=5, help="of slow networks; fast ones have more")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure of the kernel")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--peer-models", default="tiny401,small_cnn,transformer,resnet,alexnet")
    parser.add_argument("--only", help="parts to measure, where the page has the others already: " + ", ".join(PARTS))
    options = parser.parse_args()
    only = list(PARTS) if options.only is None else options.only.split(",")
    if unknown := [name for name in only if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    real = ",".join(name for name in options.models.split(",") if not name.startswith("tiny"))
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "overhead": partial(overhead, options.rounds, options.models),
        "writing": partial(writing, options.rounds, options.models),
        "bounds": partial(bounds, options.rounds),
        "reads": partial(reads, options.rounds, real),
        "peers": partial(peers, options.rounds, options.peer_models),
        "scaling": partial(scaling, options.rounds, options.steps),
        "kernel": partial(kernel, options.seconds),
    }
    begins = "\n".join([INTRODUCTION, *machine()])
    found = {} if options.only is None else _parts_of(PAGE.read_text(encoding="utf-8"), begins)
    for name in only:
        found[name] = "\n".join(_measured(parts[name]))
        page = [begins, *(f"<!-- {name} -->\n\n{found[name]}\n" for name in PARTS if name in found)]
        PAGE.write_text("\n".join(page), encoding="utf-8")  # after each part: the whole takes long
    print(PAGE)


def _measured(part: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield the lines of a part, and when it was measured."""
    began, load = datetime.datetime.now(datetime.timezone.utc), os.getloadavg()[0]
    yield from part()
    if load > (os.cpu_count() or 1):
        yield from (BUSY, "")
    yield (
        f"(Begun {began:%Y-%m-%d %H:%M} UTC. Load average then {load:.1f}, at the end {os.getloadavg()[0]:.1f}, the benchmark's"
        " own 1 included.)"
    )


def _parts_of(page: str, begins: str) -> dict[str, str]:
    """Give the parts of a page by name.

    Raises:
        SystemExit: it was measured with something else.
    """
    head, *parts = re.split(r"^<!-- (\w+) -->\n\n", page, flags=re.MULTILINE)
    if head.strip() != begins.strip():
        raise SystemExit(
            f"{PAGE} was measured on another machine, or with other versions; measure all of it: make benchmarks"
        )
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


if __name__ == "__main__":
    main()
