"""Gradient taps on torch tensors: one hook of ours per tensor, with the order of its taps under our control."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tenterhook.backends._torch_parts import Once, Parts
from tenterhook.backends._torch_unseen import hiding, unseen
from tenterhook.native import NATIVE

__all__ = ["PostAccumulateTap", "ShardTap", "Tap", "differentiated", "tap_parameter", "tap_tensor"]

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_forward_ad_on: Callable[[], bool] = torch._C._is_fwd_grad_enabled
"""Off in the forward of an ``autograd.Function``, whose author may turn gradients themselves on again."""


class _Port:
    """The one hook that we keep on a tensor; runs its taps, the last module to have finished first."""

    __slots__ = ("__weakref__", "handle", "parts", "ref", "taps")

    __torch_unserializable__ = True  # tensors are pickled without it, and without torch's warning

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self.handle: Any = None
        self.parts: Parts | None = None  # of a parameter, whose taps want the gradient of the whole pass
        self.ref = weakref.ref(self)

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # torch's own backward hooks hand on None for outputs that were not used
            return None
        if (without := unseen()) is None:
            return self._came(gradient)
        with without:
            return self._came(gradient)

    def _came(self, gradient: torch.Tensor) -> torch.Tensor | None:
        whole = None if self.parts is None else self.parts.waiting(self._run_whole)
        if whole is None:
            return self._run(gradient, self.taps)
        replaced = self._run(gradient, [tap for tap in self.taps if not tap.whole])
        whole.add(gradient if replaced is None else replaced)
        return replaced

    def _run_whole(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self._run(gradient, [tap for tap in self.taps if tap.whole])

    def _run(self, gradient: torch.Tensor, taps: list[Tap]) -> torch.Tensor | None:
        replaced = None
        for tap in reversed(taps[:]):
            if tap.live:
                new = tap.fn(gradient)
                if new is not None:
                    gradient = replaced = new
        return replaced

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class _NodePort(_Port):
    """The one hook that we keep on an output of a node of the graph, for a tensor that is soon to be another node's."""

    __slots__ = ("_output",)

    def __init__(self, output: int) -> None:
        super().__init__()
        self._output = output

    def __call__(self, gradients: Any) -> Any:
        new = super().__call__(gradients[self._output])
        return None if new is None else (*gradients[: self._output], new, *gradients[self._output + 1 :])


_PORTS = (_Port,) if NATIVE is None else (_Port, NATIVE.Port)  # the native path makes those of plain outputs


class Tap:
    """One callback on the gradient of one tensor."""

    __slots__ = ("__weakref__", "behind", "edits", "fn", "live", "module", "owner", "port", "whole")

    def __init__(self, port: _Port, fn: Callable[[Any], Any], module: Any, owner: object) -> None:
        self.port = port.ref  # the port holds its taps; a cycle would keep what they refer to until the next collection
        self.fn = fn
        self.module = None if module is None else id(module)
        self.owner = owner
        self.edits = False  # runs ahead of all that do not
        self.whole = False  # wants the gradient of the whole pass, where it comes in parts
        self.live = True
        self.behind: Tap | None = None  # of a view: the one on the tensor that it is a view of

    def run(self, gradient: torch.Tensor) -> Any:
        """Give a gradient to the callback, from the native path."""
        if (without := unseen()) is None:
            return self.fn(gradient)
        with without:
            return self.fn(gradient)

    def remove(self) -> None:
        if not self.live:
            return
        self.live = False
        if self.behind is not None:
            self.behind.remove()
        port = self.port()
        if port is None:
            return
        with contextlib.suppress(ValueError):
            port.taps.remove(self)
        if not port.taps and port.handle is not None:
            port.handle.remove()


def differentiated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose gradient is tracked: under ``vmap`` alone that is the one behind the batched tensor."""
    while not tensor.requires_grad and _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


@hiding
def tap_parameter(parameter: torch.Tensor, fn: Callable[[Any], Any], *, edits: bool = False) -> Tap:
    """Put ``fn`` on the gradient that a backward pass brings to a parameter, once a pass: also where it comes in parts."""
    return _insert(parameter, fn, None, None, edits=edits, whole=True)


@hiding
def tap_tensor(tensor: torch.Tensor, fn: Callable[[Any], Any], module: Any, owner: object) -> Tap | str:
    """Put ``fn`` on the gradient of ``tensor`` as it is now (later in-place changes make a new version of it).

    A view that is changed in place later is cut out of the graph, with the hooks on it: its gradient is then a part of that
    of the tensor behind it. Where a ``module`` is given, that is seen to.
    """
    if not tensor.requires_grad and torch.is_grad_enabled():
        tensor = differentiated(tensor)
    if not tensor.requires_grad:
        if torch.is_inference_mode_enabled():
            return "inference mode"
        return "requires_grad=False" if torch.is_grad_enabled() else "grad mode off"
    if not _forward_ad_on() and not torch.is_inference_mode_enabled():
        # In the forward of an autograd.Function: what it returns becomes the output of its node, with the hooks that are on
        # it by then. These go by the old node, and with them all that anybody puts on the tensor later.
        if tensor.grad_fn is not None:
            return _insert(tensor, fn, module, owner, node=tensor.grad_fn)
        if not torch.is_grad_enabled():
            return "grad mode off"
    if module is None or not tensor._is_view() or not _has_plain_base(tensor):
        return _insert(tensor, fn, module, owner)
    behind = _Behind(tensor, fn)
    base = tensor._base
    assert base is not None
    tap = _insert(tensor, behind.came, module, owner)
    tap.behind = _insert(base, behind.came_to_base, module, owner)
    return tap


def _has_plain_base(tensor: torch.Tensor) -> bool:
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return False
    base = tensor._base
    return type(base) is torch.Tensor and base.requires_grad and not base.is_leaf and base.layout is torch.strided


def _insert(
    tensor: torch.Tensor,
    fn: Callable[[Any], Any],
    module: Any,
    owner: object,
    *,
    edits: bool = False,
    whole: bool = False,
    node: Any = None,
) -> Tap:
    port = _port_on(tensor) if node is None else _port_on_node(node, tensor.output_nr)
    if whole and port.parts is None:
        port.parts = Parts(tensor)
    taps = port.taps
    tap = Tap(port, fn, module, owner)
    tap.whole = whole
    place = len(taps)
    if tap.module is not None:
        # Taps run from the end of the list; those of one module's one call stand together, first come first run.
        while place and taps[place - 1].module == tap.module and taps[place - 1].owner is not owner:
            place -= 1
    else:
        tap.edits = edits
        # Hooks on a tensor itself, or on an alias, run in the order in which they were put on, edits ahead of all others.
        while place and (taps[place - 1].edits if edits else taps[place - 1].module is None):
            place -= 1
    taps.insert(place, tap)
    return tap


def _port_on(tensor: torch.Tensor) -> Any:
    hooks = tensor._backward_hooks  # None again after an in-place change: the new version has hooks of its own
    if hooks:
        for hook in hooks.values():
            if isinstance(hook, _PORTS):
                return hook
    port = _Port()
    port.handle = tensor.register_hook(port)
    return port


def _port_on_node(node: Any, output: int) -> _NodePort:
    key = (_NodePort, output)
    port = node.metadata.get(key)
    if port is None or not port.taps:  # without taps it has been taken off
        port = node.metadata[key] = _NodePort(output)
        port.handle = node.register_prehook(port)
    return port


class _Behind:
    """The gradient of a view, from the view itself or, once that has been changed in place, from the tensor behind it."""

    __slots__ = ("_fn", "_offset", "_pass", "_probe", "_shape", "_strides", "_version", "_whole")

    def __init__(self, view: torch.Tensor, fn: Callable[[Any], Any]) -> None:
        base = view._base
        assert base is not None
        self._fn = fn
        self._shape, self._strides = view.shape, view.stride()
        self._offset = view.storage_offset() - base.storage_offset()
        self._whole = base.stride()
        # Shares the count of in-place changes with the view, and holds none of its memory.
        self._probe = view.detach()
        self._probe.data = view.new_empty(0)
        self._version = self._probe._version
        self._pass = -1

    def came(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self._pass = torch._C._current_graph_task_id()
        return self._fn(gradient)

    def came_to_base(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._pass == torch._C._current_graph_task_id() or self._probe._version == self._version:
            return None
        whole = gradient
        if whole.stride() != self._whole:
            whole = torch.empty_strided(whole.shape, self._whole, dtype=whole.dtype, device=whole.device).copy_(whole)
        new = self._fn(whole.as_strided(self._shape, self._strides, self._offset))
        if new is None:
            return None
        whole = whole.clone(memory_format=torch.preserve_format)
        whole.as_strided(self._shape, self._strides, self._offset).copy_(new)
        return whole


class PostAccumulateTap:
    """A callback on ``parameter.grad`` after a backward pass has added to it."""

    __slots__ = ("_handle", "live")

    def __init__(self, parameter: torch.Tensor, fn: Callable[[Any], Any]) -> None:
        self.live = True

        once = Once()

        @hiding
        def after_accumulation(leaf: torch.Tensor) -> None:
            if self.live and leaf.grad is not None and not once.wait(partial(give, leaf)):
                fn(leaf.grad)

        def give(leaf: torch.Tensor) -> None:
            if self.live and leaf.grad is not None:
                fn(leaf.grad)

        after_accumulation.__torch_unserializable__ = True  # type: ignore[attr-defined]
        self._handle = parameter.register_post_accumulate_grad_hook(after_accumulation)

    def remove(self) -> None:
        self.live = False
        self._handle.remove()


class ShardTap:
    """A callback on the gradient that one backward pass brings to a sharded parameter, which may replace it.

    Args:
        parameter: the sharded parameter.
        fn: the callback.
        edits: whether it runs ahead of all that do not.
    """

    __slots__ = ("_port", "edits", "fn", "live")

    def __init__(self, parameter: torch.Tensor, fn: Callable[[Any], Any], *, edits: bool = False) -> None:
        self.fn = fn
        self.edits = edits
        self.live = True
        self._port = _ShardPort.of(parameter)
        taps = self._port.taps
        taps.insert(sum(one.edits for one in taps) if edits else len(taps), self)

    def remove(self) -> None:
        if self.live:
            self.live = False
            self._port.taps.remove(self)
            if not self._port.taps:
                self._port.close()


class _ShardPort:
    """The one hook that we keep on a sharded parameter; runs its taps.

    Hooks on sharded parameters never fire, those after accumulation do; they see the running sum, from which what was
    there before is taken off. So the last sum is kept: as much memory as this rank's shard of the gradient.
    """

    __torch_unserializable__ = True

    def __init__(self, parameter: torch.Tensor) -> None:
        self.taps: list[ShardTap] = []
        self._sum: Any = None  # parameter.grad as it was left, and a copy of its values then
        self._values: Any = None
        self._versions = (-1, -1)
        self._once = Once()
        self._handle = parameter.register_post_accumulate_grad_hook(self)
        # what looks at the sum is to see it with the new gradient in it
        hooks: Any = parameter._post_accumulate_grad_hooks
        hooks.move_to_end(self._handle.id, last=False)

    @classmethod
    def of(cls, parameter: Any) -> _ShardPort:
        """Return the one of a parameter."""
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        return next((hook for hook in hooks if isinstance(hook, cls)), None) or cls(parameter)

    @hiding
    def __call__(self, leaf: torch.Tensor) -> None:
        if leaf.grad is not None and not self._once.wait(partial(self._arrived, leaf)):
            self._arrived(leaf)

    @torch.no_grad()
    def _arrived(self, leaf: Any) -> None:
        total = leaf.grad
        if total is None:
            return
        # Accumulation changes the shard, and only it; what zeroes the gradient counts on the distributed tensor, too.
        whole, shard = self._versions
        now_whole, now_shard = _versions(total)
        # not by one: from the third pass on FSDP2 counts more
        added = self._sum is total and now_whole == whole and now_shard > shard
        before = self._values if added else None
        gradient, changed = total if before is None else total - before, False
        for tap in self.taps[:]:
            new = tap.fn(gradient) if tap.live else None
            if new is not None:
                gradient, changed = new, True
        if changed:
            leaf.grad = total = gradient if before is None else before + gradient
        self._sum, self._values, self._versions = total, total.clone(), _versions(total)

    def close(self) -> None:
        """Take the hook off."""
        self._sum = self._values = None
        self._handle.remove()


def _versions(gradient: Any) -> tuple[int, int]:
    return gradient._version, gradient.to_local()._version
