"""What a recording cannot be cheaper than, with hooks: the same hooks with nothing in them; prints JSON.

    python -m benchmarks.bounds --rounds 9

On 401 tiny modules, ratios to the bare run: torch's own dispatch of hooks, its tensor hooks, and what the kernel and
the questions that one has to ask a tensor (dtype, device, layout, address, shape) take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models import build
from benchmarks.overhead import BOTH, FORWARD, WORKS, count_calls, ratio
from tenterhook.backends.torch import BACKEND
from tenterhook.stats import RowBuffer

After = Callable[[nn.Module, Any, Any, torch.Tensor], None]
_rows = RowBuffer(1)


def _nothing(*arguments: Any) -> None:
    pass


def _measured(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    BACKEND.summary(output)
    BACKEND.measure(output, _rows, 0)


def _tapped(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_nothing)


def _tapped_and_measured(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    _measured(module, args, kwargs, output)
    if output.requires_grad:
        output.register_hook(lambda gradient: _measured(module, args, kwargs, gradient))


@contextmanager
def hooked(net: nn.Module, after: After) -> Iterator[None]:
    """Have the two hooks that a recording needs on every module: one before, one after that also sees errors."""
    with ExitStack() as stack:
        for module in net.modules():
            stack.enter_context(module.register_forward_pre_hook(_nothing, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield


BOUNDS: dict[str, tuple[str, After]] = {
    "two empty hooks": (FORWARD, _nothing),
    "two hooks, tensor measured, nothing written down": (FORWARD, _measured),
    "two empty hooks ": (BOTH, _nothing),
    "two hooks and an empty tensor hook": (BOTH, _tapped),
    "two hooks and a tensor hook, both measured, nothing written down": (BOTH, _tapped_and_measured),
}
"""Name -> (what is timed, the hook after a call)."""


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description="What a recording cannot be cheaper than.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    net, x = build("tiny401")
    calls = count_calls(net, x)
    for name, (work, after) in BOUNDS.items():
        figure = ratio(partial(WORKS[work], net, x), partial(hooked, net, after), rounds=rounds, calls=calls)
        print(
            json.dumps({"work": work, "what": name.strip(), "ratio": figure.median, "added_us": figure.added}),
            flush=True,
        )


if __name__ == "__main__":
    main()
