"""Recomputation in the toy framework: a module that keeps nothing of its first run and runs again in the backward pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from tenterhook.backends._reruns import Reruns
from tenterhook.backends._toy_modules import Module
from tenterhook.backends._toy_tensors import Tensor, make, no_grad, tracks

__all__ = ["Checkpointed", "is_recomputing", "regions", "was_changed_by"]

_around: dict[int, list[Reruns]] = {}  # thread -> regions whose first run this is, the innermost last
_again: dict[int, list[Reruns]] = {}  # thread -> regions that are run again


class Checkpointed(Module):
    """Runs ``inner``, a module of one tensor that gives one tensor, without gradients, and once more where they are needed."""

    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not tracks():
            return self.inner(x)
        region, came = Reruns(), {}
        with no_grad(), _listed(_around, region):
            first = self.inner(x)

        def run_again(gradient: np.ndarray) -> np.ndarray:
            leaf = Tensor(x.data, requires_grad=x.requires_grad)
            outside, _around[threading.get_ident()] = _around.pop(threading.get_ident(), []), []
            try:
                with _listed(_again, region), region.around():
                    output = self.inner(leaf)
            finally:
                _around[threading.get_ident()] = outside
            output.backward(gradient)
            came["x"] = np.zeros_like(x.data) if leaf.grad is None else leaf.grad
            return np.zeros(())

        # The parameters get their gradients in the pass of the second run, which the first source sets off.
        return make(first.data, (Tensor(0.0, requires_grad=True), run_again), (x, lambda gradient: came["x"]))


@contextlib.contextmanager
def _listed(lists: dict[int, list[Reruns]], region: Reruns) -> Iterator[None]:
    running = lists.setdefault(threading.get_ident(), [])
    running.append(region)
    try:
        yield
    finally:
        running.pop()


def regions() -> list[Any]:
    """Return the regions around the forward that runs now, innermost first."""
    return _around.get(threading.get_ident(), [])[::-1]


def is_recomputing() -> bool:
    """Whether the forward that runs now is a region's second run."""
    return bool(_again.get(threading.get_ident()))


def was_changed_by(key: object) -> bool:
    """In a second run: whether the first was registered for ``key``."""
    running = _again.get(threading.get_ident())
    return not running or key in running[-1]
