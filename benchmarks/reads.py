"""What it takes to read what the modules of real networks give, the least that any statistics of it cost; prints JSON.

    python -m benchmarks.reads --rounds 9 --models transformer,resnet

Every module has a plain hook of torch's that does nothing but hand its output's memory to a pure read (``read_floor.c``) or to
the kernel: right after it was written, so in the processor's caches or not as in a run that is recorded, into rows of one buffer.
They take turns with the same hooks that hand it to nobody; that difference, of the bare step, is the figure. Beside it stand these
empty hooks and tenterhook itself, which take turns with the bare step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from benchmarks.kernel import build_read, seconds_of
from benchmarks.models import MODELS, build
from benchmarks.overhead import FORWARD, VARIANTS, WORKS, keep_memory
from tenterhook.stats import DTYPE_CODES, RowBuffer

__all__ = ["Tape", "main"]

Look = Callable[[int, int], object]
"""What is done with an output: its number in the step, and its address."""

EMPTY = "empty hooks"
_BARE = "bare"
_TURN_SECONDS = 0.12
_FEWEST = 3  # steps of a network that is slow
_TENTERHOOK = ("outputs: statistics", "outputs: statistics, sketch")
_GROUPS = {
    "kernel: statistics": (False, False),
    "kernel: statistics, digest": (False, True),
    "kernel: statistics, sketch, digest": (True, True),
}
"""What the kernel does -> (sketch, digest): a recording always takes the digest with the statistics."""


def _nothing(number: int, address: int) -> None:
    pass


class Tape:
    """The outputs of a network's modules in one step, in order; hooks hand what they have for an address to what looks at it.

    Attributes:
        calls: dtype, shape and strides (in elements) of each output.
        look: what is done with each.
    """

    def __init__(self, net: nn.Module, x: torch.Tensor) -> None:
        self.calls: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]] = []
        self.look: Look = _nothing
        self._net, self._at = net, 0
        with self._hooked(self._note):
            WORKS[FORWARD](net, x)

    def _note(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        self.calls.append((output.dtype, tuple(output.shape), output.stride()))

    def _hand_over(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        number = self._at
        self._at = number + 1 if number + 1 < len(self.calls) else 0
        self.look(number, output.data_ptr())

    @contextmanager
    def _hooked(self, after: Callable[[nn.Module, object, torch.Tensor], None]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._net.modules():
                stack.enter_context(module.register_forward_hook(after))
            yield

    @contextmanager
    def handing_over(self, look: Look = _nothing) -> Iterator[None]:
        """Have the hooks on, which hand everything over to ``look``."""
        with self._hooked(self._hand_over), self.looking(look):
            yield

    @contextmanager
    def looking(self, look: Look) -> Iterator[None]:
        """Have the hooks that are on hand everything over to another."""
        self.look, before = look, self.look
        try:
            yield
        finally:
            self.look = before

    def kinds(self) -> list[tuple[int, str, tuple[int, ...], tuple[int, ...]]]:
        """Return how many outputs there are of each dtype, shape and strides, the most frequent first."""
        counted = Counter((str(dtype).removeprefix("torch."), shape, strides) for dtype, shape, strides in self.calls)
        return [(count, *kind) for kind, count in counted.most_common()]

    def spans(self) -> list[int]:
        """Return the bytes that each output's memory has from its first element on: of an expanded one, fewer than its elements."""
        found = []
        for dtype, shape, strides in self.calls:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            found.append(min(reach, torch.Size(shape).numel()) * dtype.itemsize)
        return found

    def reader(self, read: Callable[[int, int, int], int]) -> Look:
        """Return what reads each output's bytes."""
        spans = self.spans()
        return lambda number, address: read(address, spans[number], 1)

    def measurer(self, *, sketch: bool, digest: bool) -> Look:
        """Return what has the kernel measure each output into a row of its own."""
        rows = RowBuffer(len(self.calls), sketch=sketch, digest=digest)
        flat, strided = rows.measure_flat, rows.measure
        sizes: list[tuple[int, int]] = []
        for dtype, shape, strides in self.calls:
            dense = torch.empty(shape, device="meta").stride() == strides
            sizes.append((DTYPE_CODES[str(dtype).removeprefix("torch.")], torch.Size(shape).numel() if dense else -1))

        def look(number: int, address: int) -> None:
            code, numel = sizes[number]
            if numel < 0:
                dtype, shape, strides = self.calls[number]
                strided(number, address, str(dtype).removeprefix("torch."), shape, strides)
            else:
                flat(number, address, code, numel)

        return look


class _Turns:
    """Runs a step in several ways in turn: all in each round, so that all see the same machine."""

    def __init__(self, step: Callable[[], None], ways: dict[str, Callable[[], AbstractContextManager[object]]]) -> None:
        self._step, self._ways = step, ways
        step()
        one = min(seconds_of(step, 1) for _ in range(3))
        self._times = max(_FEWEST, round(_TURN_SECONDS / one))

    def run(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of a step in each round, by way; every other round goes backwards through them."""
        taken: dict[str, list[float]] = {way: [] for way in self._ways}
        for number in range(rounds):
            for way in list(self._ways)[:: 1 if number % 2 else -1]:
                with self._ways[way]():
                    self._step()
                    self._step()
                    taken[way].append(seconds_of(self._step, self._times))
        return taken


def measure(name: str, read: Callable[[int, int, int], int], rounds: int) -> Iterator[tuple[str, float]]:
    """Measure one network's forward; yields what was done with the outputs and its ratio to the bare step."""
    net, x = build(name)
    tape = Tape(net, x)
    looks = {"read alone": tape.reader(read)}
    looks |= {what: tape.measurer(sketch=sketch, digest=digest) for what, (sketch, digest) in _GROUPS.items()}
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {_BARE: nullcontext, EMPTY: tape.handing_over}
    ways |= {what: partial(tape.handing_over, look) for what, look in looks.items()}
    ways |= {f"tenterhook, {what}": partial(VARIANTS[what].session, net) for what in _TENTERHOOK}
    taken = _Turns(partial(WORKS[FORWARD], net, x), ways).run(rounds)
    for what, seconds in taken.items():
        added = zip(seconds, taken[EMPTY if what in looks else _BARE], taken[_BARE], strict=True)
        if what != _BARE:
            yield what, 1 + statistics.median((one - without) / bare for one, without, bare in added)


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description="What it takes to read what the modules of real networks give.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default=",".join(name for name in MODELS if not name.startswith("tiny")))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        read = build_read(folder)
        for name in options.models.split(","):
            tape = Tape(*build(name))
            sizes = {"model": name, "outputs": len(tape.calls), "mb": sum(tape.spans()) / 1e6, "tensors": tape.kinds()}
            print(json.dumps(sizes), flush=True)
            for what, found in measure(name, read, options.rounds):
                print(json.dumps({"model": name, "what": what, "ratio": found}), flush=True)


if __name__ == "__main__":
    main()
