"""Taking the hooks of watched modules off: for good, or until they come back soon."""

from __future__ import annotations

from collections.abc import Iterable

from tenterhook.backends import Suspendable, Yielding
from tenterhook.calls import Watched

__all__ = ["give_way_each", "release", "release_each"]


def release(watched: Watched, *, rest: bool = False) -> None:
    """Take the hooks of one module off; ``rest`` says that they will come back soon."""
    if not rest and watched.resting is not None:
        resting, watched.resting = watched.resting, None
        resting.remove()
    attachment, watched.attachment = watched.attachment, None
    if attachment is None:
        return
    if rest and isinstance(attachment, Suspendable) and attachment.suspend():
        watched.resting = attachment
    else:
        watched.lost = watched.lost or not attachment.live
        attachment.remove()


def release_each(modules: Iterable[Watched], *, rest: bool = False) -> None:
    """Take the hooks of all these modules off, also where one's cannot be; that is raised at the end."""
    fault: Exception | None = None
    for watched in modules:
        try:
            release(watched, rest=rest)
        except Exception as one:  # those of the other modules are taken off all the same
            fault = fault or one
    if fault is not None:
        raise fault


def give_way_each(modules: Iterable[Watched]) -> None:
    """Go on at modules that have got a way of their own to run in the meantime: somebody has compiled them."""
    for watched in modules:
        attachment = watched.attachment
        if isinstance(attachment, Yielding) and not attachment.live:
            attachment.give_way()
