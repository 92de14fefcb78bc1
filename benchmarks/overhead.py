"""What a recording costs: steps with and without it in turn, in one process; medians of the ratios.

python benchmarks/overhead.py --rounds 20 --models tiny401,small_cnn
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks.models import MODELS, build


def forward(net: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        net(x)


def forward_backward(net: nn.Module, x: torch.Tensor) -> None:
    net.zero_grad(set_to_none=True)
    net(x).square().mean().backward()


def seconds(work: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def ratio(
    work: Callable[[], None], session: Callable[[], AbstractContextManager[object]], rounds: int, times: int
) -> tuple[float, float, float]:
    """Return median, lower and upper quartile of (with session) / (mean of bare before and after)."""
    work()
    ratios = []
    for _ in range(rounds):
        before = seconds(work, times)
        with session():
            work()
            work()  # the second step decides, once a session, what ends a step
            inside = seconds(work, times)
        after = seconds(work, times)
        ratios.append(inside / ((before + after) / 2))
    quartiles = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), quartiles[0], quartiles[2]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a recording costs.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    variants: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
        "bare": nullcontext,
        "order": lambda net: th.record(net, stats=None, kinds=["output"]),
        "all": th.record,
    }
    print(f"{'model':<12} {'work':<9} {'variant':<8} ratio  (quartiles)")
    for name in arguments.models.split(","):
        net, x = build(name)
        for label, work in (("forward", forward), ("both", forward_backward)):
            step = partial(work, net, x)
            times = max(1, int(0.15 / max(seconds(step, 2), 1e-6)))
            for variant, session in variants.items():
                median, low, high = ratio(step, partial(session, net), arguments.rounds, times)
                print(f"{name:<12} {label:<9} {variant:<8} {median:5.2f}  ({low:.2f}-{high:.2f})", flush=True)


if __name__ == "__main__":
    main()
