"""The tensors of the toy framework: arrays that know what they were made of."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["Parameter", "Tap", "Tensor", "at_backward_end", "backward_token", "make", "no_grad", "tracks"]

_tracking = threading.local()
_tokens = itertools.count()


class Tensor:
    """An array that knows what it was made of.

    Args:
        data: array-like; kept as float64 unless it is an array already.
        requires_grad: whether ``backward`` fills ``grad``.
    """

    def __init__(self, data: Any, *, requires_grad: bool = False) -> None:
        self.data = np.asarray(data) if isinstance(data, np.ndarray) else np.asarray(data, dtype=np.float64)
        self.requires_grad = requires_grad
        self.grad: np.ndarray | None = None
        self.taps: list[Tap] = []
        self.sources: list[tuple[Tensor, Callable[[np.ndarray], np.ndarray]]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.data.shape

    def __matmul__(self, other: Tensor) -> Tensor:
        return make(self.data @ other.data, (self, lambda g: g @ other.data.T), (other, lambda g: self.data.T @ g))

    def __add__(self, other: Tensor | float) -> Tensor:
        if not isinstance(other, Tensor):
            return make(self.data + other, (self, lambda g: g))
        return make(
            self.data + other.data,
            (self, lambda g: _unbroadcast(g, self.shape)),
            (other, lambda g: _unbroadcast(g, other.shape)),
        )

    def __mul__(self, other: Tensor | float) -> Tensor:
        if not isinstance(other, Tensor):
            return make(self.data * other, (self, lambda g: g * other))
        return make(
            self.data * other.data,
            (self, lambda g: _unbroadcast(g * other.data, self.shape)),
            (other, lambda g: _unbroadcast(g * self.data, other.shape)),
        )

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self + -other

    def __truediv__(self, other: float) -> Tensor:
        return make(_quietly(np.divide, self.data, other), (self, lambda g: _quietly(np.divide, g, other)))

    def __rtruediv__(self, other: float) -> Tensor:
        quotient = _quietly(np.divide, other, self.data)
        return make(quotient, (self, lambda g: _quietly(np.divide, -g * quotient, self.data)))

    def __getitem__(self, index: Any) -> Tensor:
        def derive(gradient: np.ndarray) -> np.ndarray:
            whole = np.zeros_like(self.data)
            whole[index] = gradient
            return whole

        return make(self.data[index], (self, derive))

    def __float__(self) -> float:
        return float(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.data, dtype)

    def relu(self) -> Tensor:
        """Return max(x, 0)."""
        return make(np.maximum(self.data, 0), (self, lambda g: g * (self.data > 0)))

    def clamp(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the elements, brought between two bounds."""
        inside = (self.data >= (-np.inf if low is None else low)) & (self.data <= (np.inf if high is None else high))
        return make(np.clip(self.data, low, high), (self, lambda g: g * inside))

    def sqrt(self) -> Tensor:
        """Return the square roots."""
        root = np.sqrt(self.data)
        return make(root, (self, lambda g: g / (2 * root)))

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        """Return the sum of all elements, shape (), or along axes."""

        def derive(gradient: np.ndarray) -> np.ndarray:
            whole = gradient if axis is None or keepdims else np.expand_dims(gradient, axis)
            return np.broadcast_to(whole, self.shape)

        return make(self.data.sum(axis=axis, keepdims=keepdims), (self, derive))

    def view(self, shape: tuple[int, ...]) -> Tensor:
        """Return the same elements in another shape."""
        return make(self.data.reshape(shape), (self, lambda g: g.reshape(self.shape)))

    def register_hook(self, fn: Callable[[Any], Any]) -> Tap:
        """Call ``fn(gradient)`` when the gradient is known, after those already there; it may return another."""
        tap = Tap(self, fn, None, None)
        self.taps.insert(0, tap)
        return tap

    def backward(self) -> None:
        """Fill ``grad`` of all leaves that this scalar came from; of those that came last, first."""
        order: list[Tensor] = []
        seen: set[int] = set()

        def visit(tensor: Tensor) -> None:
            if id(tensor) not in seen and tensor.requires_grad:
                seen.add(id(tensor))
                for source, _ in tensor.sources:
                    visit(source)
                order.append(tensor)

        visit(self)
        outer = getattr(_tracking, "token", -1)
        endings = getattr(_tracking, "endings", [])
        _tracking.token, _tracking.endings = next(_tokens), []
        try:
            gradients = {id(self): np.ones_like(self.data)}
            for tensor in reversed(order):
                gradient = gradients.pop(id(tensor), None)
                if gradient is None:
                    continue
                gradient = tensor.through_taps(gradient)
                if not tensor.sources:
                    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
                for source, derive in tensor.sources:
                    if source.requires_grad:
                        part = derive(gradient)
                        gradients[id(source)] = gradients[id(source)] + part if id(source) in gradients else part
            for ending in _tracking.endings:
                ending()
        finally:
            _tracking.token, _tracking.endings = outer, endings

    def through_taps(self, gradient: np.ndarray) -> np.ndarray:
        """Run the taps, the last module to have finished first."""
        for tap in reversed(self.taps[:]):
            if tap.live:
                new = tap.fn(Tensor(gradient))
                gradient = gradient if new is None else new.data
        return gradient

    def __repr__(self) -> str:
        return f"Tensor({np.array2string(self.data, precision=4)})"


class Parameter(Tensor):
    """A tensor that a module owns and an optimizer changes."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, requires_grad=True)


def make(data: Any, *sources: tuple[Tensor, Callable[[np.ndarray], np.ndarray]]) -> Tensor:
    """Make a tensor from others, with how the gradient of each follows from its own."""
    made = Tensor(np.asarray(data))
    if tracks() and any(source.requires_grad for source, _ in sources):
        made.requires_grad = True
        made.sources = list(sources)
    return made


def _quietly(operation: Callable[..., Any], *operands: Any) -> Any:
    with np.errstate(all="ignore"):
        return operation(*operands)


def _unbroadcast(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    extra = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(extra))) if extra else gradient
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(axis=stretched, keepdims=True) if stretched else gradient


def tracks() -> bool:
    """Whether tensors remember what they are made of, in this thread."""
    return getattr(_tracking, "on", True)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Compute without keeping track of how."""
    before, _tracking.on = tracks(), False
    try:
        yield
    finally:
        _tracking.on = before


class Tap:
    """A callback on the gradient of a tensor."""

    def __init__(self, tensor: Tensor, fn: Callable[[Any], Any], module: Any, owner: object) -> None:
        self.tensor, self.fn, self.module, self.owner, self.live = weakref.ref(tensor), fn, module, owner, True
        self.edits = False

    def remove(self) -> None:
        """Take it off."""
        self.live = False
        tensor = self.tensor()
        if tensor is not None and self in tensor.taps:
            tensor.taps.remove(self)

    def __deepcopy__(self, memo: object) -> Tap:
        """Return a tap that does nothing: a copy of a model is not watched."""
        return Tap(Tensor(0.0), lambda gradient: None, None, None)


def backward_token() -> int:
    """Return the number of the backward pass that is running in this thread, or -1."""
    return getattr(_tracking, "token", -1)


def at_backward_end(fn: Callable[[], None]) -> bool:
    """Call ``fn`` when the backward pass that is running ends; False where none is."""
    if backward_token() == -1:
        return False
    _tracking.endings.append(fn)
    return True
