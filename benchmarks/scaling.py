"""How the cost of a recording grows with the number of modules, and memory with the number of steps; prints JSON.

python -m benchmarks.scaling modules --rounds 5
python -m benchmarks.scaling steps --steps 100000
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import tenterhook as th
from benchmarks.bounds import hooked, measured
from benchmarks.overhead import forward, ratio

BLOCKS = (50, 500, 2500, 5000)


def modules(rounds: int) -> None:
    """Measure the cost of a forward for each call, with more and more tiny modules, and what it costs to attach."""
    for blocks in BLOCKS:
        torch.manual_seed(0)
        net = nn.Sequential(*(module for _ in range(blocks) for module in (nn.Linear(8, 8), nn.ReLU())))
        calls = 2 * blocks + 1
        work = partial(forward, net, torch.randn(4, 8))
        figure = ratio(work, partial(th.record, net), rounds=rounds, calls=calls)
        bound = ratio(work, partial(hooked, net, after=measured), rounds=rounds, calls=calls)
        attached = _attaching(net) / calls * 1e6
        gc.disable()
        alone = _attaching(net) / calls * 1e6
        gc.enable()
        found = {
            "modules": calls,
            "bare_us": figure.bare,
            "ratio": figure.median,
            "added_us": figure.added,
            "bound_us": bound.added,
            "attach_us": attached,
            "attach_alone_us": alone,
        }
        print(json.dumps(found), flush=True)


def _attaching(net: nn.Module) -> float:
    gc.collect()
    start = time.perf_counter()
    with th.record(net):
        return time.perf_counter() - start


def resident() -> float:
    """Give the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def steps(count: int) -> None:
    """Follow time and resident memory over many training steps recorded to disk."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(4, 8)
    folder = Path(tempfile.mkdtemp(prefix="tenterhook-"))
    try:
        with th.record(net, to=folder / "run.thk"):
            start, last = time.perf_counter(), 0
            for step in range(1, count + 1):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
                if step % (count // 10) == 0:
                    now = time.perf_counter()
                    figures = {"steps": step, "us_a_step": (now - start) / (step - last) * 1e6, "mb": resident()}
                    print(json.dumps(figures), flush=True)
                    start, last = now, step
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Run the one that is named."""
    parser = argparse.ArgumentParser(description="How the cost of a recording grows.")
    parser.add_argument("what", choices=["modules", "steps"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "modules":
        modules(arguments.rounds)
    else:
        steps(arguments.steps)


if __name__ == "__main__":
    main()
