"""What a recording costs: steps with and without it in turn, in one process; medians of the ratios.

python -m benchmarks.overhead --rounds 20 --models tiny401,small_cnn
python -m benchmarks.overhead --written    what writing it to disk adds to keeping it in memory
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks.models import MODELS, build

__all__ = [
    "BOTH",
    "FORWARD",
    "MORE",
    "VARIANTS",
    "WORKS",
    "Figure",
    "count_calls",
    "is_short",
    "keep_memory",
    "ratio",
    "run_model",
    "written",
]

FORWARD = "forward"
BOTH = "forward and backward"
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_PAIR_SECONDS = 0.12
_FEWEST = 5  # steps of a network that is slow
MORE = 3
"""Times as many rounds where a step is short."""
_WRITTEN_SECONDS = 1.2  # rows reach the disk after a second, or 32 MB, at the latest


def forward(net: nn.Module, x: torch.Tensor) -> None:
    """Run a step of inference."""
    with torch.no_grad():
        net(x)


def forward_backward(net: nn.Module, x: torch.Tensor) -> None:
    """Run a step of training without its optimizer."""
    net.zero_grad(set_to_none=True)
    net(x).square().mean().backward()


WORKS: dict[str, Callable[[nn.Module, torch.Tensor], None]] = {FORWARD: forward, BOTH: forward_backward}
"""What is timed, by name."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What was found.

    Attributes:
        median: of the ratios; ``low`` and ``high`` are their quartiles.
        added: microseconds added for each call of a module: by the ratio, to the best bare time.
        bare: microseconds of a call in the best bare time.
    """

    median: float
    low: float
    high: float
    added: float
    bare: float


@dataclass(frozen=True, slots=True)
class _Variant:
    session: Callable[[nn.Module], AbstractContextManager[object]]
    works: tuple[str, ...] = (FORWARD, BOTH)
    unit: int = 1  # steps that belong together: a sampled recording looks at one of so many


@contextmanager
def _to_disk(net: nn.Module) -> Iterator[object]:
    folder = Path(tempfile.mkdtemp(prefix="tenterhook-"))
    try:
        with th.record(net, to=folder / "run.thk") as recorder:
            yield recorder
    finally:
        shutil.rmtree(folder)


def _record(**options: Any) -> Callable[[nn.Module], AbstractContextManager[object]]:
    return lambda net: th.record(net, **options)


VARIANTS: dict[str, _Variant] = {
    "nothing (control)": _Variant(lambda net: nullcontext()),
    "order and shapes": _Variant(_record(stats=None, kinds=["output"])),
    "outputs: statistics": _Variant(_record(sketch=False, kinds=["output"])),
    "outputs: statistics, sketch": _Variant(_record(kinds=["output"])),
    "all: outputs and gradients": _Variant(_record()),
    "all, to disk": _Variant(_to_disk),
    "all, every 10th step": _Variant(_record(every=10), unit=10),
    "all, steps between": _Variant(_record(steps="0:1")),
    "param, update": _Variant(_record(kinds=["param", "update"]), works=(BOTH,)),
}
"""What is recorded, by name."""


def _seconds(work: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def ratio(
    work: Callable[[], None],
    session: Callable[[], AbstractContextManager[object]],
    *,
    rounds: int,
    calls: int,
    unit: int = 1,
) -> Figure:
    """Time the work bare, with the session and bare again, some rounds; the ratio is to the mean of the two bare times.

    Opening and closing the session is not timed.

    Args:
        work: one step.
        session: makes the context.
        rounds: how often.
        calls: of modules in a step.
        unit: the number of steps timed is a multiple of this.
    """
    work()
    one = max(_seconds(work, 2), 1e-6)
    times = unit * max(1, round(max(_PAIR_SECONDS / one, _FEWEST) / unit))
    ratios, bares = [], []
    for _ in range(rounds):
        before = _seconds(work, times)
        with session():
            work()
            second = _seconds(work, 1)  # which decides, once a session, what ends a step
            fewer = times if unit > 1 else min(times, max(1, round(times * one / second)))  # some peers are very slow
            inside = _seconds(work, fewer)
        after = _seconds(work, times)
        ratios.append(inside / ((before + after) / 2))
        bares += [before, after]
    low, median, high = statistics.quantiles(ratios, n=4)
    bare = min(bares) / calls * 1e6
    return Figure(median, low, high, (median - 1) * bare, bare)


def keep_memory() -> None:
    """Have glibc's allocator keep the memory that tensors give back.

    Else it returns some of it to the system when a step ends, or does not, as the addresses happen to lie in a session: a step of
    the transformer then has none to 12,000 page faults, bare as recorded, which is more than a recording costs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other allocators have none, and are left as they are
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_TOP_PAD):
            mallopt(parameter, 1 << 28)
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # the most that it takes


def count_calls(net: nn.Module, x: torch.Tensor) -> int:
    """Count the calls of modules in a step."""
    with th.record(net, stats=None, kinds=["output"]) as recorder:
        forward(net, x)
    return recorder.table("calls").num_rows


def run_model(name: str, rounds: int) -> Iterator[tuple[str, str, Figure]]:
    """Measure every variant on a network; yields what was timed, what was recorded and the figure."""
    net, x = build(name)
    calls = count_calls(net, x)
    for label, work in WORKS.items():
        step = partial(work, net, x)
        step()
        enough = rounds * (MORE if is_short(step) else 1)
        for variant, how in VARIANTS.items():
            if label in how.works:
                session = partial(how.session, net)
                yield label, variant, ratio(step, session, rounds=enough, calls=calls, unit=how.unit)


def is_short(step: Callable[[], None]) -> bool:
    """Say whether a step is so short that its turns are, too, and more of them are needed."""
    return _seconds(step, 2) * _FEWEST <= _PAIR_SECONDS


def written(name: str, rounds: int) -> Iterator[tuple[str, str, list[float], bool]]:
    """Measure what writing adds: steps recorded to disk take turns with steps recorded in memory.

    A turn on disk is set against the mean of the turns in memory before and after it; a turn in memory, against the mean of the
    turns in memory before and after it, is the control. What closing costs is not in it; what is turned into Parquet while the
    run goes on is.

    Args:
        name: of the network.
        rounds: turns on disk, 2 or more.

    Yields:
        What was timed, what was set against the turns in memory, the ratios, and whether a step is short.
    """
    net, x = build(name)
    memory, disk = partial(_record(), net), partial(_to_disk, net)
    for label, work in WORKS.items():
        step = partial(work, net, x)
        step()
        times = max(_FEWEST, round(_WRITTEN_SECONDS / _seconds(step, 3)))
        _turn(step, memory, times)  # warms up
        around, inside = [_turn(step, memory, times)], []
        for _ in range(rounds):
            inside.append(_turn(step, disk, times))
            around.append(_turn(step, memory, times))
        short = is_short(step)
        yield label, "to disk", _to_mean(inside, around[:-1], around[1:]), short
        yield label, "in memory (control)", _to_mean(around[1:-1], around[:-2], around[2:]), short


def _to_mean(times: list[float], before: list[float], after: list[float]) -> list[float]:
    return [one / ((earlier + later) / 2) for one, earlier, later in zip(times, before, after, strict=True)]


def _turn(step: Callable[[], None], session: Callable[[], AbstractContextManager[object]], times: int) -> float:
    gc.collect()
    with session():
        step()
        step()
        return _seconds(step, times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="What a recording costs.")
    parser.add_argument(
        "--rounds", type=int, default=15, help="three times as many where a step is short, but for --written"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--written", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    for name in arguments.models.split(","):
        if arguments.written:
            for label, way, ratios, short in written(name, arguments.rounds):
                found = {"model": name, "work": label, "what": way, "ratios": ratios, "short": short}
                print(json.dumps(found), flush=True)
            continue
        for label, variant, figure in run_model(name, arguments.rounds):
            if arguments.json:
                found = {
                    "model": name,
                    "work": label,
                    "what": variant,
                    "ratio": figure.median,
                    "added_us": figure.added,
                    "bare_us": figure.bare,
                }
                print(json.dumps(found), flush=True)
                continue
            print(
                f"{name:<12} {label:<21} {variant:<28} {figure.median:5.2f}  "
                f"({figure.low:.2f}-{figure.high:.2f})  {figure.added:+7.1f} us a call",
                flush=True,
            )


if __name__ == "__main__":
    main()
