"""Edit values: what :func:`tenterhook.edit` can do to an activation or a gradient, as small values of no framework.

An edit value prints itself, goes into ``recording.json`` as text, and is saved and loaded with :func:`save` and
:func:`load`, its tensors in safetensors. All take ``dim=`` and ``index=`` for a part of the tensor: ``index`` is a number, a slice, a
list of numbers or of booleans along ``dim``; with several dims, a tuple of indices. Dtype, device and shape stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Integral, Number
from typing import Any

import numpy as np

from tenterhook.edit_files import read, save
from tenterhook.edit_values import EditValue, is_recording
from tenterhook.errors import EditError
from tenterhook.recording import converters

__all__ = [
    "EditValue", "add", "clamp", "clip_norm", "clip_value", "interpolate", "load", "mean_of", "noise", "normalise", "patch",
    "replace", "save", "scale", "zero",
]  # fmt: skip


def _make(name: str, dim: int | Sequence[int] | None, index: Any, **options: Any) -> EditValue:
    if (dim is None) != (index is None):
        raise EditError(f"{name}: dim= and index= go together\n  for example {name}(..., dim=-1, index=slice(0, 64))")
    if dim is None:
        return EditValue(name, options)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    indices = (index,) if isinstance(dim, int) else tuple(index)
    if len(dims) != len(indices):
        raise EditError(f"{name}: {len(dims)} dims and {len(indices)} indices\n  give one index for each dim")
    return EditValue(name, options, dims, tuple(map(_plain_index, indices)))


def _plain_index(index: Any) -> Any:
    if isinstance(index, slice) or (isinstance(index, Integral) and not isinstance(index, bool)):
        return index
    array = np.asarray(index)
    if not array.ndim or (array.size and array.dtype.kind not in "iub"):
        raise EditError(
            f"index={index!r} names no places along a dim\n  give a whole number, a slice, or a list of whole numbers or of booleans"
        )
    return tuple(int(place) for place in (np.flatnonzero(array) if array.dtype == bool else array.ravel()))


def _operand(name: str, what: str, value: Any) -> Any:
    """Return ``value`` where it is a number or a tensor, or something that makes an array of numbers."""
    fits = isinstance(value, Number) or hasattr(value, "shape")
    if not fits and isinstance(value, (list, tuple)):
        try:
            fits = np.asarray(value).dtype.kind in "biufc"
        except (TypeError, ValueError, RuntimeError):
            fits = False
    if not fits:
        raise EditError(
            f"{name}: {what} is a number or a tensor, not {type(value).__name__} {value!r}\n  for example th.edits.{name}(0.5)"
        )
    return value


def _limit(name: str, what: str, value: Any, fits: Callable[[Any], Any], wanted: str) -> Any:
    """Return ``value`` where it is a number (or numbers) that ``fits``; NaN never does."""
    _operand(name, what, value)
    number = np.asarray(converters.to_numpy(value) if hasattr(value, "shape") else value)
    if not np.all(fits(number)):
        raise EditError(f"{name}: {what}={value!r}\n  give {wanted}")
    return value


def _positive(name: str, what: str, value: Any) -> Any:
    return _limit(name, what, value, lambda number: number > 0, "a number above 0; th.edits.zero() puts zero")


def _recording(name: str, value: Any) -> None:
    if not is_recording(value):
        raise EditError(
            f"{name} draws from a recording, and this is {type(value).__name__}\n  for a tensor of yours there is th.edits.replace(tensor)"
        )


def load(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`save` has written: one edit value, a list or a dictionary of them.

    Raises:
        EditError: the file is none of ours, or has a value in it that no edit can have.
    """
    return read(path, lambda name, **options: globals()[name](**options))


def zero(*, dim: Any = None, index: Any = None) -> EditValue:
    """Put zero; what is upstream gets a gradient of zero, NaN and Inf do not survive."""
    return _make("zero", dim, index)


def scale(factor: Any, *, dim: Any = None, index: Any = None) -> EditValue:
    """Multiply by a number or a tensor."""
    return _make("scale", dim, index, factor=_operand("scale", "factor", factor))


def add(amount: Any, *, dim: Any = None, index: Any = None) -> EditValue:
    """Add a number or a tensor (a steering vector)."""
    return _make("add", dim, index, amount=_operand("add", "amount", amount))


def replace(new: Any, *, dim: Any = None, index: Any = None) -> EditValue:
    """Put a number or a tensor that can be broadcast in place of the value; upstream gets a gradient of zero."""
    return _make("replace", dim, index, new=_operand("replace", "new", new))


def clamp(min: float | None = None, max: float | None = None, *, dim: Any = None, index: Any = None) -> EditValue:
    """Bring every element between ``min`` and ``max``."""
    if min is None and max is None:
        raise EditError("clamp: neither min nor max is given")
    for what, bound in (("min", min), ("max", max)):
        if bound is not None:
            _limit("clamp", what, bound, lambda number: ~np.isnan(number), "a number")
    if min is not None and max is not None and min > max:
        raise EditError(f"clamp: min={min!r} is above max={max!r}\n  give the lower bound first: clamp(min, max)")
    return _make("clamp", dim, index, min=min, max=max)


def noise(std: float, *, seed: int = 0, dim: Any = None, index: Any = None) -> EditValue:
    """Add Gaussian noise of standard deviation ``std``.

    It is a function of the seed and the address (path, slot, call, step): no random state is used or changed, and runs
    repeat. Under ``vmap`` every example gets the same.
    """
    _limit("noise", "std", std, lambda number: number >= 0, "a standard deviation of 0 or more")
    return _make("noise", dim, index, std=std, seed=seed)


def clip_value(limit: float, *, dim: Any = None, index: Any = None) -> EditValue:
    """Bring every element between ``-limit`` and ``limit``."""
    return _make("clip_value", dim, index, limit=_positive("clip_value", "limit", limit))


def clip_norm(max_norm: float, *, together: bool = False, dim: Any = None, index: Any = None) -> EditValue:
    """Scale a tensor down so that its L2 norm is at most ``max_norm``.

    Each tensor by itself, as it comes. With ``together`` the norm is that over the whole selection, which is known only
    when all gradients are there: it is for ``param_grad`` alone, and acts right before an optimizer steps. In torch that is
    on the gradients that the parameters hold (the sum over the backward passes since they were cleared), as
    ``clip_grad_norm_`` placed there does; in MindSpore on those that the optimizer is called with, as
    ``ops.clip_by_global_norm`` does. For ``grad_output`` it cannot be: the gradient of a module depends on the edited ones of
    those after it.
    """
    if together and dim is not None:
        raise EditError("clip_norm: together=True is for whole gradients\n  leave out dim= and index=")
    return _make("clip_norm", dim, index, max_norm=_positive("clip_norm", "max_norm", max_norm), together=together)


def normalise(
    to: float = 1.0, *, over: int | Sequence[int] | None = None, dim: Any = None, index: Any = None
) -> EditValue:
    """Scale to the L2 norm ``to``: the whole tensor, or each of its parts along the dims ``over``."""
    dims = over if over is None else (over,) if isinstance(over, int) else tuple(over)
    return _make("normalise", dim, index, to=_positive("normalise", "to", to), over=dims)


def patch(
    recording: Any, *, step: int | None = None, broadcast: bool = False, dim: Any = None, index: Any = None
) -> EditValue:
    """Put what a recording holds at the same address: path, kind, slot and call.

    Args:
        recording: made with ``tensors=``: live, finished or opened.
        step: which of its steps; by default its only one, or else the one of the same number.
        broadcast: whether a batch of one may stand for every element of the batch.
        dim: see the module.
        index: see the module.
    """
    _recording("patch", recording)
    return _make("patch", dim, index, recording=recording, step=step, broadcast=broadcast)


def mean_of(recording: Any, *, dim: Any = None, index: Any = None) -> EditValue:
    """Put the mean that a recording holds of the same place, over its batches, calls and steps."""
    _recording("mean_of", recording)
    return _make("mean_of", dim, index, recording=recording)


def interpolate(
    towards: Any, amount: float, *, step: int | None = None, broadcast: bool = False, dim: Any = None, index: Any = None
) -> EditValue:
    """Go the part ``amount`` of the way to a tensor, or to what a recording holds at the same address."""
    _limit("interpolate", "amount", amount, np.isfinite, "a finite number: 0 stays, 1 is all the way")
    if not is_recording(towards):
        _operand("interpolate", "towards", towards)
    return _make("interpolate", dim, index, towards=towards, amount=amount, step=step, broadcast=broadcast)
