"""Hook points for anybody's own code: ``th.HookPoint("after_batch")``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tenterhook._fork_locks import ForkLock
from tenterhook.errors import HookError
from tenterhook.handles import Handle, HookSite, check_signature, name_of

__all__ = ["HookPoint"]


class HookPoint:
    """A place in your own code at which others can have their callbacks run.

    ```python
    after_batch = th.HookPoint("after_batch", arguments=("loss", "batch"))
    handle = after_batch.register(lambda loss, batch: print(float(loss)))
    loss = after_batch(loss, batch)  # in the loop
    handle.remove()
    ```

    A call runs all callbacks in order and gives the first argument back. A callback returns None, or a value that takes
    the first argument's place for the callbacks after it and for the caller. One that raises ends the call there, and
    what it raised goes on to the caller with a note that names point and callback. A callback that is removed while a
    call is under way does not run any more, one that is added runs from the next call on; what a callback calls does not
    call that callback again. Any thread may register, remove and call. Copies and pickles of a point have no callbacks.

    Args:
        name: for messages.
        arguments: names of the arguments that the point is called with, so that a callback which does not take them is
            refused when it is registered.
    """

    def __init__(self, name: str, *, arguments: Sequence[str] | None = None) -> None:
        self.name = name
        self.arguments = None if arguments is None else tuple(arguments)
        self._lock = ForkLock()
        self._sites: tuple[HookSite, ...] = ()

    def register(self, fn: Callable[..., Any], *, prepend: bool = False) -> Handle:
        """Have ``fn`` run at each call of the point, after those that are there, or before them with ``prepend``.

        Raises:
            HookError: ``fn`` is no function, or does not take the point's arguments.
        """
        if self.arguments is not None or not callable(fn):
            check_signature(fn, self.arguments or (), f"hook point {self.name!r}")
        site = HookSite("point", self.name, fn)
        site.attached(_Place(self, site))
        with self._lock:
            self._sites = (site, *self._sites) if prepend else (*self._sites, site)
        return Handle([site])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the callbacks; returns the first argument, or what they made of it (None where there is none).

        Raises:
            HookError: a callback returned something and there is no argument that it could replace.
        """
        for site in self._sites:
            if not site.live or site.busy:
                continue
            with self._lock:
                site.fired += 1
            new = site.call(*args, **kwargs)
            if new is None:
                continue
            if not args:
                raise HookError(
                    f"hook point {self.name!r}: {name_of(site.fn)} returned {type(new).__name__}, but the point was called"
                    " with no argument that it could replace\n  return None"
                )
            args = (new, *args[1:])
        return args[0] if args else None

    def __len__(self) -> int:
        return len(self._sites)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<HookPoint {self.name!r}: {', '.join(name_of(site.fn) for site in self._sites) or 'no callbacks'}>"

    def __deepcopy__(self, memo: object) -> HookPoint:
        return HookPoint(self.name, arguments=self.arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self.name, self.arguments))


def _rebuilt(name: str, arguments: tuple[str, ...] | None) -> HookPoint:
    return HookPoint(name, arguments=arguments)


class _Place:
    """A callback's place at its point, which it does not keep alive."""

    __slots__ = ("_point", "_site")

    def __init__(self, point: HookPoint, site: HookSite) -> None:
        self._point = weakref.ref(point)
        self._site = site

    @property
    def live(self) -> bool:
        point = self._point()
        return point is not None and self._site in point._sites

    def remove(self) -> None:
        point = self._point()
        if point is not None:
            with point._lock:
                point._sites = tuple(site for site in point._sites if site is not self._site)
