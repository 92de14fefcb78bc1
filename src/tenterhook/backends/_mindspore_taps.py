"""Gradient taps on MindSpore tensors: one hook of ours per tensor, with the order of its taps under our control.

A native hook that is removed while it runs takes the process down, so hooks come off after the backward pass. A native
hook on a tensor that needs no gradient never fires and marks the tensor as one that does, so none is put there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import mindspore

from tenterhook.backends._mindspore_offers import Wanted
from tenterhook.backends._mindspore_passes import after_pass, in_pass, run_after_pass
from tenterhook.backends._mindspore_seams import executor
from tenterhook.backends._mindspore_watching import STATE, Hold

__all__ = ["ParameterTap", "Tap", "tap_parameter", "tap_tensor", "taps_on", "version_of", "why_no_gradient"]


def why_no_gradient(tensor: mindspore.Tensor) -> str | None:
    """Say why no gradient can come to a tensor now; None where one can."""
    if not tensor._requires_grad:
        if not executor.enable_grad():
            return "grad mode off"
        return (
            "requires_grad=False" if executor.grad_flag() else "no gradient function (value_and_grad, grad) is running"
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return "requires_grad=False"  # MindSpore says True of the integer results of what is differentiated
    return None


def version_of(tensor: mindspore.Tensor) -> int:
    """Return a number that changes when a tensor is changed in place."""
    node = tensor._grad_node  # assignment to a part of a tensor is not counted, but gives it a new node
    return tensor._version if node is None else tensor._version + (node._sequence_nr() << 20)


class _Port:
    """The one hook that we keep on a tensor; runs its taps, the last module to have finished first."""

    __slots__ = ("handle", "running", "taps", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.taps: list[Tap] = []
        self.handle: Any = None
        self.running = False

    def __call__(self, gradient: mindspore.Tensor | None) -> mindspore.Tensor | None:
        if gradient is None:  # of an operation with several outputs, one that nobody used
            return None
        replaced = None
        self.running = True
        try:
            for tap in reversed(self.taps[:]):
                if tap.live:
                    new = tap.fn(gradient)
                    if new is not None:
                        gradient = replaced = new
        finally:
            self.running = False
        return replaced

    def take_off(self) -> None:
        if not self.taps and self.handle is not None:
            handle, self.handle = self.handle, None
            handle.remove()


class Tap:
    """One callback on the gradient of one tensor."""

    __slots__ = ("__weakref__", "edits", "fn", "live", "module", "owner", "port")

    def __init__(self, port: _Port, fn: Callable[[Any], Any], module: Any, owner: object) -> None:
        self.port = port
        self.fn = fn
        self.module = None if module is None else id(module)
        self.owner = owner
        self.edits = False  # runs ahead of all that do not
        self.live = True

    def remove(self) -> None:
        """Take it off, the native hook below it as soon as that can be. A second call does nothing."""
        if not self.live:
            return
        self.live = False
        port = self.port
        with contextlib.suppress(ValueError):
            port.taps.remove(self)
        if not port.taps:
            if port.running or in_pass():
                after_pass(port.take_off)
            else:
                run_after_pass()
                port.take_off()


_ports: dict[int, tuple[weakref.ref[Any], _Port]] = {}


def _port_of(tensor: mindspore.Tensor) -> _Port:
    key = id(tensor)
    version = 0 if tensor._is_leaf else version_of(tensor)
    found = _ports.get(key)
    if found is not None and found[0]() is tensor and found[1].version == version and found[1].handle is not None:
        return found[1]
    port = _Port(version)
    port.handle = tensor.register_hook(port)

    def forget(ref: weakref.ref[Any]) -> None:
        if key in _ports and _ports[key][0] is ref:
            del _ports[key]

    _ports[key] = (weakref.ref(tensor, forget), port)
    return port


def taps_on(tensor: mindspore.Tensor) -> list[Tap]:
    """List the taps that are on a tensor now."""
    ref, port = _ports.get(id(tensor), (None, None))
    return list(port.taps) if port is not None and ref is not None and ref() is tensor else []


def tap_tensor(
    tensor: mindspore.Tensor, fn: Callable[[Any], Any], module: Any, owner: object, *, edits: bool = False
) -> Tap | str:
    """Put ``fn`` on the gradient of ``tensor`` as it is now (later in-place changes make a new version of it)."""
    reason = why_no_gradient(tensor)
    if reason is not None:
        return reason
    port = _port_of(tensor)
    taps = port.taps
    tap = Tap(port, fn, module, owner)
    place = len(taps)
    if tap.module is not None:
        # Taps run from the end of the list; those of one module's one call stand together, first come first run.
        while place and taps[place - 1].module == tap.module and taps[place - 1].owner is not owner:
            place -= 1
    else:
        tap.edits = edits
        while place and taps[place - 1].edits:
            place -= 1
    taps.insert(place, tap)
    return tap


class ParameterTap:
    """A callback on the gradient of a parameter, from a backward pass or, where none shows it, from the optimizer's call."""

    __slots__ = ("_hold", "_tap", "_wanted")

    def __init__(self, tap: Tap, wanted: Wanted) -> None:
        self._tap = tap
        self._wanted = wanted
        self._hold = Hold()
        STATE.listens += 1

    @property
    def live(self) -> bool:
        """Whether it is on."""
        return self._tap.live

    def remove(self) -> None:
        """Take it off. A second call does nothing."""
        if self._tap.live:
            STATE.listens -= 1
        self._tap.remove()
        self._wanted.remove()
        self._hold.release()


def tap_parameter(parameter: mindspore.Parameter, fn: Callable[[Any], Any], *, edits: bool) -> ParameterTap | str:
    """Call ``fn(gradient)`` once a backward pass, or once a step where only the optimizer is shown the gradient."""
    wanted = Wanted(parameter, fn, edits=edits)
    tap = tap_tensor(parameter, wanted, None, None, edits=edits)
    if isinstance(tap, str):
        wanted.remove()
        return tap
    return ParameterTap(tap, wanted)
