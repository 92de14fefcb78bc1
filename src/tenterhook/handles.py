"""What a registration gives back: handles that can be removed, counted and asked why they never fired."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tenterhook.backends import Backend, Detachable
from tenterhook.errors import HookError
from tenterhook.notes import note_error

__all__ = ["Handle", "HookSite", "check_signature", "in_callback", "name_of", "without_cycle"]

_running: dict[int, list[HookSite]] = {}  # thread -> callbacks that run in it, the innermost last


def in_callback() -> bool:
    """Whether some callback of tenterhook is running in this thread."""
    return bool(_running.get(threading.get_ident()))


def name_of(fn: Callable[..., Any]) -> str:
    """Return a callback's name for tables and messages: ``Monitor.on_output``, ``partial(clip)``."""
    inner = getattr(fn, "func", None)
    if inner is not None and not hasattr(fn, "__qualname__"):
        return f"partial({name_of(inner)})"
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def check_signature(fn: Callable[..., Any], expected: tuple[str, ...], what: str) -> None:
    """Refuse a callback that cannot take the arguments that it will be given.

    Raises:
        HookError: it is not callable, or takes other arguments.
    """
    if not callable(fn):
        raise HookError(f"{what} needs a function, got {type(fn).__name__} {fn!r}\n  give fn({', '.join(expected)})")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables of C show no signature; they are tried as they are
        return
    try:
        signature.bind(*expected)
    except TypeError as error:
        raise HookError(
            f"{what} calls fn({', '.join(expected)}), but {name_of(fn)}{signature} does not take that: {error}\n"
            f"  write it as def {name_of(fn).rpartition('.')[2].strip('<>()') or 'fn'}({', '.join(expected)})"
        ) from None


class _OwnMethod:
    """A method of the model's own, as a callback on the model: held by it anyway, so that it need not be held again."""

    def __init__(self, method: Any) -> None:
        self.__qualname__ = method.__qualname__
        self._method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any) -> Any:
        method = self._method()
        return None if method is None else method(*arguments)


def without_cycle(fn: Callable[..., Any], modules: Iterable[object]) -> Callable[..., Any]:
    """Return a callback that does not keep a model alive which it is itself a method of."""
    owner = getattr(fn, "__self__", None)
    if inspect.ismethod(fn) and any(module is owner for module in modules):
        return _OwnMethod(fn)
    return fn


class HookSite:
    """One callback on one module, parameter, tensor or function."""

    __slots__ = ("_attachment", "fired", "fn", "kind", "lingering", "live", "path", "reason", "recomputed")

    def __init__(self, kind: str, path: str, fn: Callable[..., Any]) -> None:
        self.kind = kind
        self.path = path
        self.fn = fn
        self.fired = 0
        self.recomputed = 0  # times it ran in a checkpoint's recomputation; not counted in ``fired``
        self.lingering = 0  # edits in checkpointed regions that have yet to be repeated
        self.live = True
        self.reason: str | None = None  # why it has not fired, where that is known
        self._attachment: Detachable | None = None

    def attached(self, attachment: Detachable) -> None:
        """Keep what the framework gave for our hook."""
        self._attachment = attachment

    @property
    def in_place(self) -> bool:
        """Whether the framework still holds our hook."""
        return self.live and self._attachment is not None and self._attachment.live

    def applies(self, backend: Backend) -> bool:
        """Whether the callback is to run now.

        Until it is removed, and after that where checkpointing repeats an edited call; not for what it calls itself.
        """
        return (self.live or (self.lingering > 0 and backend.in_backward())) and not self.busy

    @property
    def busy(self) -> bool:
        """Whether the callback is running in this thread now: what it calls does not call it again."""
        return self in _running.get(threading.get_ident(), ())

    def call(self, *arguments: Any) -> Any:
        """Run the callback; what it raises gets a note that names the place."""
        thread = threading.get_ident()
        running = _running.setdefault(thread, [])
        running.append(self)
        try:
            return self.fn(*arguments)
        except Exception as error:
            note_error(error, f"raised by {name_of(self.fn)}, {self.kind} hook on {self.path or '(root)'}")
            raise
        finally:
            running.pop()
            if not running:
                _running.pop(thread, None)

    def repeated(self) -> None:
        """An edit has been applied again in a recomputation; the last one lets a removed hook go."""
        if self.lingering:
            self.lingering -= 1
            if not self.live and not self.lingering:
                self._detach()

    def remove(self) -> None:
        """Take the hook off, at once; a second call does nothing."""
        self.live = False
        if not self.lingering:
            self._detach()

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None


class Handle:
    """One registration, on one place or on many; removes itself at the end of a ``with``.

    A handle that is dropped leaves its hooks on, as the frameworks' own handles do.
    """

    __slots__ = ("sites",)

    def __init__(self, sites: Iterable[HookSite]) -> None:
        self.sites: list[HookSite] = list(sites)

    def remove(self) -> None:
        """Take the hooks off, at once: also one that is about to run. A second call does nothing."""
        for site in self.sites:
            site.remove()

    @property
    def fired(self) -> int:
        """How often the callback has run, over all places; repeats in a checkpoint's recomputation are not counted."""
        return sum(site.fired for site in self.sites)

    @property
    def live(self) -> bool:
        """Whether some hook of it is still in place."""
        return any(site.in_place for site in self.sites)

    @property
    def paths(self) -> list[str]:
        """Where the hooks are, or were."""
        return [site.path for site in self.sites]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        places = self.paths[0] if len(self.sites) == 1 else f"{len(self.sites)} places"
        kind = self.sites[0].kind if self.sites else "hook"
        return (
            f"<Handle {kind} on {places or '(root)'}: fired {self.fired} times, {'live' if self.live else 'removed'}>"
        )
