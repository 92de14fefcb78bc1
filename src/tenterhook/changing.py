"""What a callback has done to a value: replaced it, changed it in place, or changed it so that the framework does not know.

A callback that returns something makes an edit. Two edits are never meant: one that takes what comes before out of the
training, and one that changes the value behind the back of differentiation; both are told once. A third is refused: to
give back, in a later call, the value of an earlier one that was left alone then, as ``store.setdefault(name, output)`` does.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from types import CodeType
from typing import Any

from tenterhook.backends import Backend
from tenterhook.errors import EditError, TenterhookWarning
from tenterhook.handles import HookSite
from tenterhook.stats import GROUP_DIGEST, RowBuffer
from tenterhook.values import leaves

__all__ = ["change", "check_not_earlier"]

_digests = threading.local()


def _digest(backend: Backend, tensor: Any) -> int | None:
    """The digest of a tensor's bytes, None where it has none to read."""
    rows: RowBuffer | None = getattr(_digests, "rows", None)
    if rows is None:
        rows = _digests.rows = RowBuffer(1, sketch=False)
    rows.valid[0] = 0
    with backend.untraced() or contextlib.nullcontext():
        backend.measure(tensor, rows, 0)
    if rows.deferred:  # a tensor of a device: this question cannot wait
        rows.settle()
    return int(rows.digests[0]) if rows.valid[0] & GROUP_DIGEST else None


class _Before:
    """One tensor of a value, as it was before the callback."""

    __slots__ = ("address", "digest", "origin", "slot", "tensor", "tracked", "version")

    def __init__(self, backend: Backend, slot: str, tensor: Any, *, looks: bool, always: bool) -> None:
        self.slot = slot
        self.tensor = tensor
        self.version = backend.version(tensor)
        self.tracked = backend.wants_gradient(tensor)
        self.origin = backend.origin(tensor) if self.tracked else None
        self.address = None if self.origin is None else backend.address(tensor)
        self.digest = _digest(backend, tensor) if always or (looks and self.origin is not None) else None

    def is_changed(self, backend: Backend) -> bool:
        """Whether the tensor is another one now, or has other values."""
        return (
            backend.version(self.tensor) != self.version
            or backend.wants_gradient(self.tensor) != self.tracked
            or (self.address is not None and backend.address(self.tensor) != self.address)
            or (self.digest is not None and _digest(backend, self.tensor) != self.digest)
        )

    def is_same_to_the_graph(self, backend: Backend) -> bool:
        """Whether differentiation takes it for the same result of the same computation."""
        return self.origin is not None and backend.origin(self.tensor) == self.origin


def change(
    backend: Backend, site: HookSite, value: Any, call: Callable[[], Any], where: str, allow: Collection[str]
) -> Any:
    """Return what ``call()`` wants in place of ``value``, or None.

    Under activation checkpointing what was changed here must be changed in the same way when the region is run again
    for its gradient, and only then: whether the hook is still on by that time or not.

    A change in place that is not differentiated (``output.data.mul_(2)``) is told. What leaves no trace in the framework's
    count of versions is found by a digest of the values, at the 1st, 2nd, 4th, 8th, ... call of a hook, and at each call in a
    checkpointed region.
    """
    regions = backend.regions()
    tracks = backend.tracks_gradients()
    if not regions and not tracks:
        new = call()
        return new if new is None or backend.was_changed_by(site) else None
    site.looked += 1
    looks = not site.looked & (site.looked - 1) and not site.warning and "detached" not in allow
    before = [
        _Before(backend, slot, tensor, looks=looks, always=bool(regions))
        for slot, tensor in leaves(value, backend.tensor_types)
    ]
    new = call()
    changed = [one for one in before if one.is_changed(backend)]
    if new is None and not changed:
        return None
    if not backend.was_changed_by(site):
        return None
    site.repeat_in(regions)
    if tracks and not site.warning and "detached" not in allow:
        cut_off = [one.slot for one in before if one.tracked]
        if cut_off:
            _warn_if_cut_off(backend, site, cut_off, value if new is None else new, where)
        _warn_if_untracked(site, [one.slot for one in changed if one.is_same_to_the_graph(backend)], where)
    return new


def _warn_if_cut_off(backend: Backend, site: HookSite, tracked: list[str], new: Any, where: str) -> None:
    """Say once that what was part of the graph is no longer: training upstream stops without a word otherwise."""
    found = dict(leaves(new, backend.tensor_types))
    cut = [slot for slot in tracked if slot in found and not backend.wants_gradient(found[slot])]
    if cut:
        site.warning = "its new value was detached: what comes before is not trained by it"
        warnings.warn(
            f"{where}: the new value is detached, the old one was not: no gradient goes on from here"
            f"{f' at {cut[0]}' if cut[0] else ''}, and what comes before is not trained by it\n"
            '  compute the new value from the old one, or permit it with allow="detached"',
            TenterhookWarning,
            stacklevel=3,
        )


def _warn_if_untracked(site: HookSite, slots: list[str], where: str) -> None:
    """Say once that the gradient will be that of the value as it was before the callback."""
    if slots and not site.warning:
        site.warning = "it changed the value without being differentiated: gradients are those of the value before"
        warnings.warn(
            f"{where}: the value was changed in place{f' at {slots[0]}' if slots[0] else ''} without being differentiated (through "
            ".data, detach(), no_grad or NumPy): gradients are those of the value before the change\n"
            '  return the new value instead, or permit it with allow="detached"',
            TenterhookWarning,
            stacklevel=3,
        )


_left_alone: dict[CodeType, dict[int, weakref.ref[Any]]] = {}
"""Code of a callback -> the tensors that it gave back as it had been given them, by id, while they live."""


def check_not_earlier(
    backend: Backend, site: HookSite, value: Any, new: Any, where: str, handed: Iterable[Any] = ()
) -> None:
    """Refuse the value of an earlier call, which the callback left alone then.

    ``store.setdefault(name, output)`` gives back what it is given in the first call, which does nothing, and the same again
    in every later one. The same lines of code are one callback, in whatever session they stand.

    Args:
        backend: the framework.
        site: the callback's place.
        value: what it was given.
        new: what it returned in its place.
        where: for the message.
        handed: what else it was given in this call, and may return.

    Raises:
        EditError: it is that.
    """
    if new is None or new is value:
        returned = leaves(value, backend.tensor_types) if new is value else []
        _remember(site, (tensor for _, tensor in returned))
        return
    present = dict(leaves(value, backend.tensor_types))
    given = {id(tensor) for tensor in present.values()}
    given.update(id(tensor) for one in handed for _, tensor in leaves(one, backend.tensor_types))
    kept = _kept(site)
    first, site.returned = not site.returned, True
    for slot, tensor in leaves(new, backend.tensor_types):
        if id(tensor) in given:
            _remember(site, [tensor])
            continue
        now = present.get(slot)
        earlier = kept.get(id(tensor))
        if earlier is not None and earlier() is tensor and (now is None or not _is_copy(backend, tensor, now)):
            raise EditError(
                f"{where}{' ' + slot if slot else ''}: the callback returned a value of an earlier call, which it had left as it was "
                "then; what a callback returns replaces the value\n"
                "  store.setdefault(name, value) returns what is stored: write store[name] = value, or return None; if it is meant, "
                "return a copy"
            )
        if first and now is not None and (_is_alias(backend, tensor, now) or _sets_default(backend, site, tensor, now)):
            _remember(site, [tensor])


def _sets_default(backend: Backend, site: HookSite, tensor: Any, now: Any) -> bool:
    """Whether a copy of what was given was stored by ``setdefault``; other copies that are returned may be meant."""
    fn = _function(site.fn)
    names = getattr(getattr(fn, "__code__", None), "co_names", (getattr(fn, "__name__", ""),))
    return "setdefault" in names and _is_copy(backend, tensor, now)


def _is_copy(backend: Backend, tensor: Any, other: Any) -> bool:
    digest = _digest(backend, tensor)
    return digest is not None and digest == _digest(backend, other)


def _function(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__wrapped__", fn)


def _is_alias(backend: Backend, tensor: Any, other: Any) -> bool:
    address = backend.address(tensor)
    return address is not None and address == backend.address(other)


def _kept(site: HookSite) -> dict[int, weakref.ref[Any]]:
    code = getattr(_function(site.fn), "__code__", None)
    return site.left_alone if code is None else _left_alone.get(code, {})


def _remember(site: HookSite, tensors: Iterable[Any]) -> None:
    code = getattr(_function(site.fn), "__code__", None)
    for tensor in tensors:
        kept = site.left_alone if code is None else _left_alone.setdefault(code, {})
        key = id(tensor)
        if key not in kept:
            with contextlib.suppress(TypeError):  # not every framework's tensors can be referred to weakly
                kept[key] = weakref.ref(tensor, functools.partial(_forget, kept, key, code))


def _forget(kept: dict[int, weakref.ref[Any]], key: int, code: CodeType | None, reference: object) -> None:
    kept.pop(key, None)
    if not kept and code is not None and _left_alone.get(code) is kept:
        del _left_alone[code]
