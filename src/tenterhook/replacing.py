"""Checks on what a callback gives back in place of a value."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from tenterhook.backends import Backend
from tenterhook.errors import EditError, HookError
from tenterhook.values import leaves, same_structure

__all__ = ["ALLOWANCES", "allowed", "check_replacement", "replacement_arguments"]

ALLOWANCES = ("structure", "shape", "dtype", "device", "detached")
"""What ``allow=`` can permit to change."""


def allowed(allow: str | Collection[str]) -> frozenset[str]:
    """Read what the user wrote for ``allow=``.

    Raises:
        HookError: something in it cannot be permitted.
    """
    chosen = frozenset([allow] if isinstance(allow, str) else allow)
    unknown = sorted(chosen - set(ALLOWANCES))
    if unknown:
        raise HookError(f"allow={unknown[0]!r} is not known\n  what can be permitted is {', '.join(ALLOWANCES)}")
    return chosen


def check_replacement(backend: Backend, old: Any, new: Any, where: str, allow: Collection[str] = ()) -> None:
    """Refuse a replacement that the code around it does not expect.

    Raises:
        EditError: structure, shape, dtype or device differ and ``allow`` does not permit it.
    """
    types = backend.tensor_types
    if "structure" not in allow:
        difference = same_structure(old, new, types)
        if difference is not None:
            raise EditError(
                f"{where}: the value returned has another structure: {difference}\n"
                '  return the same structure, or None to leave the value alone; allow="structure" permits the change'
            )
    for (slot, before), (_, after) in zip(leaves(old, types), leaves(new, types), strict=False):
        if before is after:
            continue
        with backend.untraced() or contextlib.nullcontext():  # a trace has tensors for sizes
            looks = backend.summary(before), backend.summary(after)
        for what, was, now in zip(("shape", "dtype", "device"), *looks, strict=True):
            if was != now and what not in allow:
                raise EditError(
                    f"{where}{' ' + slot if slot else ''}: the value returned has {what} {now}, it was {was}\n"
                    f'  return a value of the same {what}, or permit it with allow="{what}"'
                )


def replacement_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any, where: str, *, with_kwargs: bool, is_tensor: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read what a forward-pre callback returned as new ``(args, kwargs)``.

    A bare tensor stands for the only positional argument, as in the frameworks.

    Raises:
        EditError: it is neither.
    """
    if with_kwargs:
        if (
            isinstance(returned, tuple)
            and len(returned) == 2
            and isinstance(returned[0], tuple)
            and isinstance(returned[1], dict)
        ):
            return returned[0], returned[1]
        raise EditError(
            f"{where}: a callback with with_kwargs=True returned {type(returned).__name__}\n  return (args tuple, kwargs dict), or None"
        )
    if isinstance(returned, tuple):
        return returned, kwargs
    if isinstance(returned, is_tensor) and len(args) == 1:
        return (returned,), kwargs
    raise EditError(
        f"{where}: the callback returned {type(returned).__name__}, which does not replace {len(args)} positional argument(s)\n"
        "  return a tuple of the new arguments, or None to leave them alone"
    )
