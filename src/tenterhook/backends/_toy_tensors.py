"""The tensors of the toy framework: arrays that know what they were made of."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tenterhook.backends import OpListener

__all__ = ["OpTeller", "Parameter", "Tap", "Tensor", "at_backward_end", "backward_token", "make", "no_grad", "tracks"]

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
        self.version = 0
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

    __radd__ = __add__
    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> Tensor:
        def derive(gradient: np.ndarray) -> np.ndarray:
            whole = np.zeros_like(self.data)
            np.add.at(whole, index, gradient)
            return whole

        return make(self.data[index], (self, derive))

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.requires_grad:
            raise RuntimeError("the toy framework cannot differentiate what is changed in place")
        self.data[index] = value.data if isinstance(value, Tensor) else value
        self.version += 1

    def __truediv__(self, other: Tensor | float) -> Tensor:
        if not isinstance(other, Tensor):
            other = Tensor(other)
        ratio = _divided(self.data, other.data)
        return make(
            ratio,
            (self, lambda g: _unbroadcast(_divided(g, other.data), self.shape)),
            (other, lambda g: _unbroadcast(_divided(-g * ratio, other.data), other.shape)),
        )

    def __rtruediv__(self, other: float) -> Tensor:
        return Tensor(other) / self

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self + other * -1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.data, dtype=dtype)

    def clamp(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the elements that lie between two bounds as they are, the others at the nearer bound."""
        inside = np.ones(self.shape, bool)
        inside &= True if low is None else self.data >= low
        inside &= True if high is None else self.data <= high
        return make(np.clip(self.data, low, high), (self, lambda g: g * inside))

    def sqrt(self) -> Tensor:
        """Return the square root of each element."""
        root = np.sqrt(self.data)
        return make(root, (self, lambda g: g / (2 * root)))

    def relu(self) -> Tensor:
        """Return max(x, 0)."""
        return make(np.maximum(self.data, 0), (self, lambda g: g * (self.data > 0)))

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the sum of all elements, shape (), or of those along some axes."""

        def derive(gradient: np.ndarray) -> np.ndarray:
            if axis is not None and not keepdims:
                gradient = np.expand_dims(gradient, axis)
            return np.broadcast_to(gradient, self.shape)

        return make(self.data.sum(axis=axis, keepdims=keepdims), (self, derive))

    def view(self, shape: tuple[int, ...]) -> Tensor:
        """Return the same elements in another shape."""
        return make(self.data.reshape(shape), (self, lambda g: g.reshape(self.shape)))

    def register_hook(self, fn: Callable[[Tensor], Tensor | None]) -> Tap:
        """Call ``fn(gradient)`` in the backward pass, after those registered before; what it returns replaces the gradient."""
        tap = Tap(self, fn, None, None)
        self.taps.insert(0, tap)
        return tap

    def backward(self, gradient: np.ndarray | None = None) -> None:
        """Fill ``grad`` of all leaves that this came from; of those that came last, first.

        Args:
            gradient: of this tensor itself; ones by default.
        """
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
            gradients = {id(self): np.ones_like(self.data) if gradient is None else gradient}
            for tensor in reversed(order):
                own = gradients.pop(id(tensor), None)
                if own is None:
                    continue
                own = tensor.through_taps(own)
                if not tensor.sources:
                    tensor.grad = own if tensor.grad is None else tensor.grad + own
                for source, derive in tensor.sources:
                    if source.requires_grad:
                        part = derive(own)
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
    if getattr(_tracking, "listeners", ()):
        _tell(made)
    return made


class OpTeller:
    """A context in which a listener is told of the operations on tensors in this thread."""

    def __init__(self, listener: OpListener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        _tracking.listeners = [*getattr(_tracking, "listeners", ()), self._listener]

    def __exit__(self, *exception: object) -> None:
        _tracking.listeners = [one for one in _tracking.listeners if one is not self._listener]

    def gives(self, value: Any) -> None:
        """Nothing is left to do: an operation's own result is what is differentiated."""


def _tell(made: Tensor) -> None:
    """Say which operation has made a tensor: the method that has called :func:`make`."""
    frame = sys._getframe(2)
    name = frame.f_code.co_name.strip("_")
    caller = frame.f_back
    line = None if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
    for listener in _tracking.listeners:
        begun = listener.begins(name, lambda: line)
        if begun is not None:
            listener.ends(begun, made, None)


def _divided(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # infinities and NaN are what the frameworks give, too
        return one / other


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
