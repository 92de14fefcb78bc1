"""Taking the hooks of watched modules off: for good, or until they come back soon."""

from __future__ import annotations

from collections.abc import Iterable

from tenterhook.backends import Suspendable
from tenterhook.calls import Watched

__all__ = ["release", "release_each"]


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
