"""What a registration gives back: handles that can be removed, counted and asked why they never fired."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tenterhook.backends import Detachable, Region, to_user
from tenterhook.errors import HookError
from tenterhook.leaf_taps import LeafTaps
from tenterhook.notes import note_error

__all__ = ["Handle", "HookSite", "check_signature", "in_callback", "name_of", "without_cycle"]

_running: dict[int, list[HookSite]] = {}  # thread -> callbacks that run in it, the innermost last


def in_callback() -> bool:
    """Whether some callback of tenterhook is running in this thread."""
    return bool(_running.get(threading.get_ident()))


def name_of(fn: Callable[..., Any]) -> str:
    """Return a callback's name for tables and messages: ``Monitor.on_output``, ``partial(clip)``, ``<lambda> (line 7)``."""
    inner = getattr(fn, "func", None)
    if inner is not None and not hasattr(fn, "__qualname__"):
        return f"partial({name_of(inner)})"
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    code = getattr(fn, "__code__", None)
    return f"{name} (line {code.co_firstlineno})" if name.endswith("<lambda>") and code is not None else name


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
            f"  write it as {_as_written(fn, expected)}"
        ) from None


def _as_written(fn: Callable[..., Any], expected: tuple[str, ...]) -> str:
    """Return how a callback with these parameters is written, in the manner in which ``fn`` is."""
    name = name_of(fn).rpartition(".")[2]
    if name.startswith("<lambda>"):  # its line follows
        return f"lambda {', '.join(expected)}: ..."
    if inspect.ismethod(fn):
        expected = ("self", *expected)
    elif not (inspect.isroutine(fn) and name.isidentifier()):  # an object that can be called, functools.partial
        return f"fn({', '.join(expected)})"
    return f"def {name}({', '.join(expected)}): ..."


class _OwnMethod:
    """A method of the model's own, as a callback on the model: held by it anyway, so that it need not be held again."""

    def __init__(self, method: Any) -> None:
        self.__qualname__ = method.__qualname__
        self._method = weakref.WeakMethod(method)

    @property
    def __wrapped__(self) -> Any:
        return self._method()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        method = self._method()
        return None if method is None else method(*arguments, **keywords)


def without_cycle(fn: Callable[..., Any], modules: Iterable[object]) -> Callable[..., Any]:
    """Return a callback that does not keep a model alive which it is itself a method of."""
    owner = getattr(fn, "__self__", None)
    if inspect.ismethod(fn) and any(module is owner for module in modules):
        return _OwnMethod(fn)
    return fn


class HookSite:
    """One callback on one module, parameter, tensor or function."""

    __slots__ = (
        "_attachment",
        "_repeating",
        "at_removal",
        "calls",
        "fired",
        "fn",
        "kind",
        "leaf_taps",
        "left_alone",
        "live",
        "looked",
        "midway",
        "parameter",
        "path",
        "reason",
        "recomputed",
        "returned",
        "told",
        "unfired",
        "warning",
    )

    def __init__(self, kind: str, path: str, fn: Callable[..., Any]) -> None:
        self.kind = kind
        self.path = path
        self.fn = fn
        self.fired = 0
        self.calls = 0  # of a gradient hook: times its module was called and gradients were to come
        self.recomputed = 0  # times it ran in a checkpoint's recomputation; not counted in ``fired``
        self.warning = ""  # what was warned of, which its line in a table says, too
        self.told: Sequence[str] = ()  # what is changed as long as it is on
        self.looked = 0  # calls in which changes behind the framework's back were, or were not, looked for
        self.returned = False  # whether it has returned something else than what it was given
        self.left_alone: dict[
            int, weakref.ref[Any]
        ] = {}  # what it gave back as it was given it, where its code has no name
        self.live = True
        self.midway = False  # whether its module was running when it was put on
        self.reason: str | None = None  # why it has not fired, where that is known
        self.parameter: Callable[[], Any] | None = None  # of a hook on a parameter: the one that it is on
        self.unfired = ""  # what to say where it has not fired and nothing else is wrong
        self.at_removal: Callable[[], None] | None = None
        self._attachment: Detachable | None = None
        self.leaf_taps = LeafTaps()
        self._repeating: list[int] = []  # threads that recompute a region in which it has changed something

    def attached(self, attachment: Detachable) -> None:
        """Keep what the framework gave for our hook."""
        self._attachment = attachment

    @property
    def in_place(self) -> bool:
        """Whether the framework still holds our hook."""
        return self.live and self._attachment is not None and self._attachment.live

    @property
    def applies(self) -> bool:
        """Whether the callback is to run now.

        Until it is removed, and after that where checkpointing repeats an edited call; not for what it calls itself.
        """
        return (self.live or threading.get_ident() in self._repeating) and not self.busy

    @property
    def busy(self) -> bool:
        """Whether the callback is running in this thread now: what it calls does not call it again."""
        return self in _running.get(threading.get_ident(), ())

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the callback; what it raises gets a note that names the place."""
        thread = threading.get_ident()
        running = _running.setdefault(thread, [])
        running.append(self)
        try:
            return to_user(self.fn, arguments, keywords)
        except Exception as error:
            note_error(error, f"raised by {name_of(self.fn)}, {self.kind} hook on {self.path or '(root)'}")
            raise
        finally:
            running.pop()
            if not running:
                _running.pop(thread, None)

    def repeat_in(self, regions: Iterable[Region]) -> None:
        """Run again, removed or not, where these checkpointed regions are recomputed: the value was changed in them."""
        for region in regions:
            region.on_rerun(self, partial(self._again, self._attachment), self._attachment)

    @contextlib.contextmanager
    def _again(self, attachment: Detachable | None) -> Iterator[None]:
        thread = threading.get_ident()
        self._repeating.append(thread)
        self._attachment = attachment  # a region inside the repeated one is to have it, too
        try:
            yield
        finally:
            self._repeating.remove(thread)
            if not self.live and not self._repeating:
                self._attachment = None

    def remove(self) -> None:
        """Take the hook off, at once; a second call does nothing."""
        self.live = False
        self.leaf_taps.remove()
        if self.at_removal is not None:
            self.at_removal()
            self.at_removal = None
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
    def told(self) -> list[str]:
        """What a hook of :func:`tenterhook.register_forward_hook` and its kin changes as long as it is on, as sentences."""
        return list(dict.fromkeys(line for site in self.sites for line in site.told))

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
