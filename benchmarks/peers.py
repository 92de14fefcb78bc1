"""What others cost that look at every module's output, beside tenterhook, in one process; prints JSON.

    python -m benchmarks.peers --rounds 7

They do different things: TorchLens follows every operation and builds a graph of them, nnsight runs a program of the
user's beside the model, and hooks written by hand keep references or compute a few numbers. The ratio is to a bare
forward, and takes in what each does for every run. What is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks.models import build
from benchmarks.overhead import Figure, count_calls, forward, keep_memory, ratio

Step = Callable[[nn.Module, torch.Tensor], object]


@contextmanager
def _hooks(net: nn.Module, fn: Callable[..., None]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in net.modules():
            stack.enter_context(module.register_forward_hook(fn))
        yield


def keep_references(net: nn.Module, x: torch.Tensor) -> object:
    """Hook every module for this run and keep its output, as baukit's TraceDict does."""
    kept: dict[nn.Module, Any] = {}
    with torch.no_grad(), _hooks(net, lambda module, args, output: kept.__setitem__(module, output)):
        net(x)
    return kept


def by_hand(net: nn.Module, x: torch.Tensor) -> object:
    """Hook every module for this run and compute the same basic statistics with torch's own reductions."""
    kept: dict[nn.Module, list[float]] = {}

    def statistics(module: nn.Module, args: Any, y: torch.Tensor) -> None:
        kept[module] = [
            float(number)
            for number in (
                y.min(), y.max(), y.mean(), y.std(correction=0), y.square().mean().sqrt(), y.abs().max(),
                y.isnan().sum(), y.isinf().sum(), (y == 0).sum(),
            )
        ]  # fmt: skip

    with torch.no_grad(), _hooks(net, statistics):
        net(x)
    return kept


def torchlens_record(net: nn.Module, x: torch.Tensor) -> object:
    """Keep every module's output with TorchLens."""
    with torch.no_grad():
        return importlib.import_module("torchlens").record(net, x, default_module=True)


def torchlens_trace(net: nn.Module, x: torch.Tensor) -> object:
    """Trace every operation with TorchLens, as it does by default."""
    with torch.no_grad():
        return importlib.import_module("torchlens").trace(net, x)


@functools.cache
def _as_they_end(net: nn.Module, shape: torch.Size) -> list[nn.Module]:
    """List the modules inside a network in the order in which their first calls end: in no other may nnsight be asked for them."""
    ended: dict[nn.Module, None] = {}
    with torch.no_grad(), _hooks(net, lambda module, args, output: ended.setdefault(module)):
        net(torch.zeros(shape))
    return [module for module in ended if module is not net]


def nnsight_trace(net: nn.Module, x: torch.Tensor) -> object:
    """Save every module's output with nnsight."""
    traced: Any = importlib.import_module("nnsight").NNsight(net)
    by_module = {envoy._module: envoy for envoy in traced.modules()}
    envoys = [by_module[module] for module in _as_they_end(net, x.shape)]
    with torch.no_grad(), traced.trace(x):
        for envoy in envoys:
            envoy.output.save()
    return traced


PEERS: dict[str, tuple[Step, str | None]] = {
    "hooks that keep references, as baukit's": (keep_references, None),
    "statistics written by hand": (by_hand, None),
    "nnsight, all outputs saved": (nnsight_trace, "nnsight"),
    "TorchLens, record of modules": (torchlens_record, "torchlens"),
    "TorchLens, trace": (torchlens_trace, "torchlens"),
}
"""Name -> (one run, the package that it needs)."""


@contextmanager
def _instead(step: dict[str, Step], peer: Step) -> Iterator[None]:
    bare, step["run"] = step["run"], peer
    try:
        yield
    finally:
        step["run"] = bare


def compare(name: str, rounds: int) -> Iterator[tuple[str, Figure | str]]:
    """Measure all on one network; yields names with figures, or with what went wrong."""
    net, x = build(name)
    calls = count_calls(net, x)
    step: dict[str, Step] = {"run": forward}

    def work() -> None:
        step["run"](net, x)

    yield "nothing (control)", ratio(work, nullcontext, rounds=rounds, calls=calls)
    yield "tenterhook, all", ratio(work, partial(th.record, net), rounds=rounds, calls=calls)
    for label, (peer, package) in PEERS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            yield label, "not installed"
            continue
        try:
            peer(net, x)
        except Exception as error:  # theirs, of any kind; the table says so
            yield label, f"failed: {type(error).__name__}"
            continue
        yield label, ratio(work, partial(_instead, step, peer), rounds=rounds, calls=calls)


def main() -> None:
    """Print one JSON object a line: model, what, figure."""
    parser = argparse.ArgumentParser(description="What others cost.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default="tiny401,small_cnn,transformer,resnet,alexnet")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    versions = {
        package: importlib.metadata.version(package)
        for package in ("nnsight", "torchlens")
        if importlib.util.find_spec(package)
    }
    print(json.dumps({"versions": versions}), flush=True)
    for model in arguments.models.split(","):
        for label, figure in compare(model, arguments.rounds):
            value = figure if isinstance(figure, str) else [figure.median, figure.low, figure.high]
            print(json.dumps({"model": model, "what": label, "figure": value}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
