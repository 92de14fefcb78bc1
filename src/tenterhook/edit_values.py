"""What an edit value is and does; :mod:`tenterhook.edits` makes them.

Operations are written in what the frameworks' tensors have in common, and a few methods of the backend.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenterhook.address import Address
from tenterhook.backends import Backend
from tenterhook.errors import EditError, NotRecordedError

__all__ = ["OPERATIONS", "EditValue", "is_recording"]

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_HALF = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, eq=False, repr=False)
class EditValue:
    """One change of a tensor; made by the functions of this module.

    Attributes:
        name: which of them.
        options: its arguments.
        dim: the dimensions that ``index`` is along; empty for the whole tensor.
        index: which places along each.
    """

    name: str
    options: Mapping[str, Any]
    dim: tuple[int, ...] = ()
    index: tuple[Any, ...] = ()
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False)

    def apply(self, value: Any, address: Address, backend: Backend) -> Any:
        """Return what comes in the place of ``value``, a tensor, which stays as it is.

        Raises:
            EditError: the edit does not fit the tensor.
            NotRecordedError: the recording that it draws from does not hold this address.
        """
        mask = self._mask(tuple(value.shape), address)
        on = _On(self, value, address, backend, mask)
        new = OPERATIONS[self.name](on, value)
        return new if mask is None else backend.where(backend.constant(mask, value, boolean=True), new, value)

    def _mask(self, shape: tuple[int, ...], address: Address) -> np.ndarray | None:
        if not self.dim:
            return None
        key = ("mask", shape)
        if key in self._cache:
            return self._cache[key]
        mask = np.ones((), bool)
        for dim, index in zip(self.dim, self.index, strict=True):
            if not -len(shape) <= dim < len(shape):
                raise EditError(
                    f"{self!r} at {address}: no dim {dim} in a tensor of shape {shape}\n  count dims from 0, or back from -1"
                )
            along = np.zeros(shape[dim], bool)
            try:
                along[list(index) if isinstance(index, tuple) else index] = True
            except IndexError as error:
                raise EditError(
                    f"{self!r} at {address}: {error}\n  the tensor has shape {shape}: dim {dim} goes to {shape[dim] - 1}"
                ) from None
            mask = mask & along.reshape([-1 if place == dim % len(shape) else 1 for place in range(len(shape))])
        self._cache[key] = mask
        return mask

    def __repr__(self) -> str:
        shown = [
            _shown(name, value) for name, value in self.options.items() if value is not None and value is not False
        ]
        if self.dim:
            one = len(self.dim) == 1
            shown += [f"dim={self.dim[0] if one else self.dim}", f"index={self.index[0] if one else self.index}"]
        return f"{self.name}({', '.join(shown)})"


_BY_PLACE = frozenset({
    "factor", "amount", "new", "std", "limit", "max_norm", "to", "recording", "towards",
})  # fmt: skip
"""Options that are written without their name."""


def _shown(name: str, value: Any) -> str:
    whole = not hasattr(value, "shape") or value.shape == ()
    text = repr(value) if whole else f"{type(value).__name__}{tuple(value.shape)}"
    return text if name in _BY_PLACE else f"{name}={text}"


@dataclass(frozen=True, slots=True)
class _On:
    """What an operation knows of where it acts."""

    edit: EditValue
    value: Any
    address: Address
    backend: Backend
    mask: np.ndarray | None

    def option(self, name: str) -> Any:
        return self.edit.options[name]

    def operand(self, name: str) -> Any:
        """A number as it is; an array or a tensor beside the value."""
        given = self.option(name)
        return given if isinstance(given, (int, float)) else self.beside(given)

    def beside(self, given: Any) -> Any:
        """A number, an array or a tensor as a tensor beside the value.

        Raises:
            EditError: it cannot be broadcast to the value.
        """
        shape, wanted = tuple(np.shape(given)), tuple(self.value.shape)
        try:
            fits = np.broadcast_shapes(shape, wanted) == wanted
        except ValueError:
            fits = False
        if not fits:
            raise EditError(
                f"{self.edit!r} at {self.address}: a tensor of shape {shape} does not fit the value there, of shape {wanted}\n"
                "  give one that can be broadcast to it; dim= and index= choose which part of the result is taken"
            )
        return self.backend.constant(given, self.value)

    def instead(self, new: Any) -> Any:
        """``new`` everywhere; the value stays in the graph, with a gradient of zero."""
        everywhere = self.backend.constant(np.ones((), bool), self.value, boolean=True)
        return self.backend.where(everywhere, self.beside(new), self.value)

    def norm(self, value: Any, over: tuple[int, ...] | None = None) -> Any:
        """The L2 norm of the edited part, in single precision at least."""
        if self.mask is not None:
            nothing = self.backend.constant(0.0, value)
            value = self.backend.where(self.backend.constant(self.mask, value, boolean=True), value, nothing)
        if self.backend.summary(value)[1] in _HALF:
            value = value.float()
        squares = value * value
        return (squares.sum() if over is None else squares.sum(over, keepdims=True)).sqrt()

    def recorded(self, name: str) -> Any:
        """What a recording holds at this address."""
        return _recorded(self, self.option(name))


def _clip_norm(on: _On, value: Any) -> Any:
    # norm > max_norm and norm <= max_norm alike, without asking the device which
    factor = (on.option("max_norm") / (on.norm(value) + _EPSILON)).clamp(None, 1.0)
    return value * on.backend.constant(factor, value)


def _normalise(on: _On, value: Any) -> Any:
    size = on.norm(value, on.option("over")).clamp(1e-12, None)
    return value * on.backend.constant(on.option("to") / size, value)


def _noise(on: _On, value: Any) -> Any:
    # A function of seed and address: the same when a checkpointed region is run again, and in every framework.
    generator = np.random.default_rng([on.option("seed"), zlib.crc32(str(on.address).encode())])
    return value + on.backend.constant(generator.standard_normal(tuple(value.shape)) * on.option("std"), value)


def _replace(on: _On, value: Any) -> Any:
    return on.instead(on.option("new"))


def _interpolate(on: _On, value: Any) -> Any:
    source = on.option("towards")
    other = on.recorded("towards") if is_recording(source) else source
    return value + (on.beside(other) - value) * on.operand("amount")


OPERATIONS: dict[str, Callable[[_On, Any], Any]] = {
    "zero": lambda on, value: on.instead(0.0),
    "scale": lambda on, value: value * on.operand("factor"),
    "add": lambda on, value: value + on.operand("amount"),
    "replace": _replace,
    "clamp": lambda on, value: value.clamp(on.option("min"), on.option("max")),
    "noise": _noise,
    "clip_value": lambda on, value: value.clamp(-on.option("limit"), on.option("limit")),
    "clip_norm": _clip_norm,
    "normalise": _normalise,
    "patch": lambda on, value: on.instead(on.recorded("recording")),
    "mean_of": lambda on, value: on.instead(_mean(on, on.option("recording"))),
    "interpolate": _interpolate,
}


# --- from recordings -----------------------------------------------------------------------------------------------
def is_recording(value: Any) -> bool:
    """Whether a value is a recording, live or finished."""
    return hasattr(value, "coverage") and hasattr(value, "order")


def _values(on: _On, source: Any, *, call: int | None) -> list[Any]:
    recording = getattr(source, "recording", source)
    address = on.address
    calls = [one for one in recording[address.path].calls if call is None or one.call == call]
    slot = address.slot.removeprefix(".")
    found = [one for each in calls for one in each.select(address.kind.value) if one.slot.removeprefix(".") == slot]
    if not found:
        what = address.site if call is None else address.site.at(call)
        raise NotRecordedError(
            f"{on.edit.name}: the recording holds no {what}\n  record that call and that kind: th.record(..., kinds=..., tensors=True)"
        )
    return found


def _once(on: _On, source: Any, key: Any, make: Callable[[], Any]) -> Any:
    """Read a finished recording once for each place; one that is still written to, every time."""
    cache = on.edit._cache
    if key not in cache:
        made = make()
        if not getattr(source, "recording", source).manifest.complete:
            return made
        cache[key] = made
    return cache[key]


def _recorded(on: _On, source: Any) -> Any:
    call = on.address.call or 0
    by_step = _once(
        on, source, (on.address.site, call), lambda: {one.step: one for one in _values(on, source, call=call)}
    )
    step = on.option("step")
    step = step if step is not None else next(iter(by_step)) if len(by_step) == 1 else on.address.step
    if step not in by_step:
        raise NotRecordedError(
            f"{on.edit.name}: the recording holds no step {step} of {on.address.site}, only {', '.join(map(str, by_step))}\n"
            f"  say which: th.edits.{on.edit.name}(..., step=...)"
        )
    found = by_step[step]
    shape, dtype, _ = on.backend.summary(on.value)
    if found.dtype != dtype:
        raise EditError(
            f"{on.edit.name} at {on.address}: the recording has dtype {found.dtype}, the model {dtype} here\n"
            "  record a run of the same dtype, or give the tensor itself: th.edits.replace(tensor)"
        )
    if found.shape != shape and not (on.option("broadcast") and found.shape == (1, *shape[1:])):
        same = found.shape[1:] == shape[1:]
        hint = "the same batch size, or one example and give broadcast=True" if same else "inputs of the same shape"
        raise EditError(
            f"{on.edit.name} at {on.address}: the recording has shape {found.shape}, the model {shape} here\n  record {hint}"
        )
    return found.tensor


def _mean(on: _On, source: Any) -> np.ndarray:
    site = on.address.site

    def read() -> np.ndarray:
        arrays = [one.as_numpy() for one in _values(on, source, call=None)]
        if len({array.shape[1:] for array in arrays}) != 1 or not all(array.ndim for array in arrays):
            raise EditError(
                f"mean_of at {site}: the recorded tensors differ in more than the batch size: {sorted({a.shape for a in arrays})}"
            )
        count = sum(len(array) for array in arrays)
        return np.sum([array.sum(0, dtype=np.float64) for array in arrays], axis=0)[None] / count

    return _once(on, source, ("mean", site), read)
