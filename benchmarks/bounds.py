"""What a recording cannot be cheaper than: the same hooks, or the same place around a call, with nothing in them; prints JSON.

    python -m benchmarks.bounds --rounds 9

On 401 tiny modules, ratios to the bare run: torch's own dispatch of hooks, its tensor hooks, and what the kernel and
the questions that one has to ask a tensor (dtype, device, layout, address, shape) take. Last what bounds a sampled
recording: one that puts on and takes off what does nothing, in turn for one step of ten.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks.models import build
from benchmarks.overhead import BOTH, FORWARD, WORKS, Figure, count_calls, keep_memory, ratio
from tenterhook.backends.torch import BACKEND
from tenterhook.stats import RowBuffer

After = Callable[[nn.Module, Any, Any, torch.Tensor], None]
_rows = RowBuffer(1)


def _nothing(*arguments: Any) -> None:
    pass


def measured(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    """Ask a tensor all that a recording asks it, and write nothing down."""
    BACKEND.summary(output)
    BACKEND.measure(output, _rows, 0)


def _tapped(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_nothing)


def _tapped_and_measured(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    measured(module, args, kwargs, output)
    if output.requires_grad:
        output.register_hook(lambda gradient: measured(module, args, kwargs, gradient))


@contextmanager
def hooked(net: nn.Module, after: After) -> Iterator[None]:
    """Have the two hooks that a recording needs on every module: one before, one after that also sees errors."""
    with ExitStack() as stack:
        for module in net.modules():
            stack.enter_context(module.register_forward_pre_hook(_nothing, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield


@contextmanager
def root_hooked(net: nn.Module) -> Iterator[None]:
    """Have an empty hook on the root alone: what counting its calls takes where we do not stand around them, but in torch's tables."""
    with net.register_forward_pre_hook(_nothing, with_kwargs=True):
        yield


@contextmanager
def around(net: nn.Module) -> Iterator[None]:
    """Have every module run its forward and nothing else: where a recording stands, if there are no other hooks."""
    for module in net.modules():
        module.__dict__["_compiled_call_impl"] = module.forward
    try:
        yield
    finally:
        for module in net.modules():
            del module.__dict__["_compiled_call_impl"]


class _Sampled:
    """A step that has the two empty hooks on every tenth time, as ``every=10`` has its own."""

    def __init__(self, work: Callable[[nn.Module, torch.Tensor], None], net: nn.Module, x: torch.Tensor) -> None:
        self._work, self._net, self._x = work, net, x
        self._step = -1
        self.on = False

    def __call__(self) -> None:
        self._step += 1
        if self.on and self._step % 10 == 0:
            with hooked(self._net, measured):
                self._work(self._net, self._x)
        else:
            self._work(self._net, self._x)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample for the length of a ``with``."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


BOUNDS: dict[str, tuple[str, Callable[[nn.Module], AbstractContextManager[None]]]] = {
    "forward called without torch's way to its hooks": (FORWARD, around),
    "one empty hook, on the root only": (FORWARD, root_hooked),
    "two empty hooks": (FORWARD, partial(hooked, after=_nothing)),
    "two hooks, tensor measured, nothing written down": (FORWARD, partial(hooked, after=measured)),
    "two empty hooks ": (BOTH, partial(hooked, after=_nothing)),
    "two hooks and an empty tensor hook": (BOTH, partial(hooked, after=_tapped)),
    "two hooks and a tensor hook, both measured, nothing written down": (
        BOTH,
        partial(hooked, after=_tapped_and_measured),
    ),
}
"""Name -> (what is timed, what is on the network meanwhile)."""


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description="What a recording cannot be cheaper than.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    keep_memory()
    net, x = build("tiny401")
    calls = count_calls(net, x)
    for name, (work, on) in BOUNDS.items():
        _say(work, name.strip(), ratio(partial(WORKS[work], net, x), partial(on, net), rounds=rounds, calls=calls))
    sampled = _Sampled(WORKS[FORWARD], net, x)
    what = "two hooks, tensor measured, nothing written down, put on for every 10th step"
    _say(FORWARD, what, ratio(sampled, sampled.sampling, rounds=rounds, calls=calls, unit=10))
    one = nn.Sequential(nn.Identity())
    what = "a recording's step between samples, of a model of one module that does nothing: µs a step"
    between = partial(th.record, one, steps="0:1")
    _say(FORWARD, what, ratio(partial(WORKS[FORWARD], one, torch.ones(1)), between, rounds=rounds, calls=1))


def _say(work: str, what: str, figure: Figure) -> None:
    found = {"work": work, "what": what, "ratio": figure.median, "added_us": figure.added, "bare_us": figure.bare}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
