"""What a framework must offer beyond looking, so that values can be changed; part of the protocol of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

__all__ = ["EditingMethods", "Instead", "Layer"]

Instead = Callable[[Callable[..., Any], tuple[Any, ...], "dict[str, Any]"], Any]
"""``(call, args, kwargs)`` in place of a module's call; ``call(*args, **kwargs)`` makes it after all."""


class Layer(IntEnum):
    """Where callbacks stand among ours on the same module, whenever they were put on; within a layer, first come first run."""

    FIRST = 0  # ahead of all hooks on the module, others' too
    EDIT = 1  # changes values: what observes sees the new ones
    OBSERVE = 2
    LAST = 3  # nearest to the module before the call, furthest from it after


class EditingMethods(Protocol):
    """The part of a backend that changes values."""

    def constant(self, value: Any, like: Any, *, boolean: bool = False) -> Any:
        """Return an array, number or tensor as a tensor of the dtype (or of booleans) and on the device of ``like``."""
        ...

    def where(self, mask: Any, new: Any, old: Any) -> Any:
        """Return ``new`` where the boolean tensor ``mask`` is true, else ``old``; the three are broadcast."""
        ...

    def bypass(self, module: Any, instead: Instead) -> Any:
        """Have ``instead`` called in place of the module's call, with all hooks on it, whenever the module is called.

        The module's forward function stays what it is. Returns a ``Detachable`` that can also be put back for the second
        run of a checkpointed region.
        """
        ...

    def gradients(self, fn: Callable[[Sequence[Any]], Any], at: Sequence[Any]) -> list[Any]:
        """Return the gradients of ``fn(tensors)``, a scalar, where the tensors are ``at``; those of parameters stay as they are."""
        ...

    def clip_together(self, parameters: Sequence[Any], max_norm: float) -> None:
        """Scale gradients, right before an optimizer steps, so that their common norm is at most ``max_norm``.

        They are those that the parameters hold or, where these hold none, those that the optimizer is called with.

        Raises:
            UnsupportedError: there are none of either.
        """
        ...
