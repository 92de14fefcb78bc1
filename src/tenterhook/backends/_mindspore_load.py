"""Hooks that run after weights have been loaded into a MindSpore cell, by either of its two loaders.

The hooks of a cell live in the cell's ``__dict__``, not in a table keyed by cells: a hook usually refers to its cell,
and such a table would then keep both alive for ever. Copies and pickles of the cell carry none of them.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
from mindspore import nn
from mindspore.common.hook_handle import HookHandle

from tenterhook.backends._mindspore_loader import HookPointInLoader, choose_hook_point, guess_prefixes
from tenterhook.errors import HookError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "IncompatibleKeys",
    "LoadHookHandle",
    "hold_hook_point",
    "load_hooks_of",
    "native_method",
    "register_load_param_hook",
    "register_load_post_hook",
    "release_hook_point",
    "run_hooks_of_cell",
]

METHOD = "register_load_param_into_net_post_hook"
_ATTRIBUTE = "_load_param_into_net_post_hook"
_STATE_DICT_METHOD = "register_load_state_dict_post_hook"
_STATE_DICT_ATTRIBUTE = "_lazy_load_state_dict_post_hooks"


class IncompatibleKeys(NamedTuple):
    """The names that did not match in a load: the loader's own lists, which a hook may change in place.

    Attributes:
        missing_keys: Names of parameters of the net for which nothing was given.
        unexpected_keys: Names that were given and that no parameter of the net bears.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


Hook = Callable[[Any, Any], None]
"""``hook(cell, incompatible_keys)``."""


class _Hooks(OrderedDict[int, "_Entry"]):
    """The hooks of one cell by handle id; a copy is an empty dict that needs no tenterhook to unpickle."""

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class _Entry:
    """One hook on one cell, as the loaders call it. Copies and pickles of it do nothing."""

    def __init__(self, hook: Hook | None = None, fired: list[int] | None = None) -> None:
        self.hook = hook
        self.fired = [0] if fired is None else fired
        self.running = 0
        self.after_guess = False
        self.cell: weakref.ref[Any] | None = None
        self.taken_off: list[Callable[[], None]] = []

    def __call__(self, cell: Any, incompatible_keys: Any, path: str | None = None) -> None:
        """Run the hook, unless it has been removed.

        Raises:
            HookError: The hook returned something.
        """
        hook = self.hook
        if hook is None:
            return
        self.running += 1
        try:
            result: object = hook(cell, incompatible_keys)
        finally:
            self.running -= 1
        self.fired[0] += 1
        if result is not None:
            where = type(cell).__name__ if path is None else f"{path or '(root)'} ({type(cell).__name__})"
            raise HookError(
                f"the load hook {_name(hook)} on cell {where} returned a {type(result).__name__}; a load hook must "
                "return None: change incompatible_keys.missing_keys and .unexpected_keys in place instead"
            )

    def remove(self) -> None:
        """Stop running the hook, and take it off its cell unless the cell is just walking over it."""
        with _lock:
            self.hook = None
            if not self.running:
                for take_off in self.taken_off:
                    take_off()
                self.taken_off.clear()
                _entries.discard(self)
            _sync()

    def __reduce__(self) -> tuple[type[_Entry], tuple[()]]:
        return _Entry, ()


class _Loader:
    """What has been done to MindSpore's loader, and whether it is to stay so without hooks."""

    point: HookPointInLoader | None = None
    held = False


class LoadHookHandle(HookHandle):
    """Takes a load hook off its cell: by `remove`, or at the end of a ``with`` block.

    Like MindSpore's own handles it keeps neither hook nor cell alive. A handle without a hook (as given in graph
    mode, or in a copied cell) is inert.
    """

    def __init__(self, entry: Any = None) -> None:
        super().__init__()
        self.handle_id = next(_ids)
        self._entry: weakref.ref[_Entry] | None = None if entry is None else weakref.ref(entry)
        self._fired: list[int] = [0] if entry is None else entry.fired

    @property
    def live(self) -> bool:
        """Whether the hook is on a cell that still exists."""
        entry = None if self._entry is None else self._entry()
        return entry is not None and entry.hook is not None and entry.cell is not None and entry.cell() is not None

    @property
    def fired(self) -> int:
        """How many times the hook has run to its end."""
        return self._fired[0]

    def remove(self) -> None:
        """Take the hook off; may be called often, also from inside a hook.

        A hook that is removed while it runs under ``load_state_dict`` does nothing from then on; its empty place
        among the cell's hooks is cleared by the next `remove`, since MindSpore cannot do it at that moment.
        """
        entry = None if self._entry is None else self._entry()
        if entry is not None:
            entry.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[type[LoadHookHandle], tuple[()]]:
        return LoadHookHandle, ()


def register_load_post_hook(cell: nn.Cell, hook: Hook, *, after_guess: bool = False) -> LoadHookHandle:
    """Run a hook whenever weights have been loaded into a cell or into a cell that contains it.

    It runs for ``load_param_into_net`` (under any name by which it was imported, and inside ``load_checkpoint(net=)``)
    and for ``Cell.load_state_dict``. MindSpore's loader is changed while such hooks exist, and is as before once the
    last one is removed.

    In ``load_param_into_net`` the hook runs before mismatched prefixes are guessed at: names that differ by a prefix
    are still in both lists. A hook that empties ``missing_keys`` makes the loader skip that guess, so that those
    parameters keep the values they have. The guess itself corrects ``missing_keys`` only. All hooks of one load share
    the two lists, children's hooks run before those of their parents; a cell used in several places is met once by
    ``load_param_into_net``, and once for each place by ``load_state_dict``.

    Args:
        cell: The cell to watch.
        hook: Called with ``(cell, incompatible_keys)``; must return None. Its exceptions end the load, at which
            moment the matching parameters have their new values already.
        after_guess: Run in ``load_param_into_net`` after the guess instead, after all hooks that run before it: the
            lists are then those that the call returns.

    Returns:
        A handle; inert, after a warning, in graph mode.

    Raises:
        HookError: `hook` is not callable, or `cell` is not a Cell.
        UnsupportedError: The installed MindSpore's loader has an unknown form.
    """
    if not _accepts(cell, hook, "register_load_post_hook"):
        return LoadHookHandle()
    with _lock:
        entry = _attach(cell, hook)
        entry.after_guess = after_guess
        if hasattr(cell, _STATE_DICT_METHOD):
            _attach_to_state_dict(cell, entry)
        return LoadHookHandle(entry)


def register_load_param_hook(cell: nn.Cell, hook: Hook) -> LoadHookHandle:
    """Run a hook after ``load_param_into_net`` only; otherwise as `register_load_post_hook`."""
    if not _accepts(cell, hook, METHOD, stacklevel=4):
        return LoadHookHandle()
    with _lock:
        return LoadHookHandle(_attach(cell, hook))


def run_hooks_of_cell(
    cell: nn.Cell,
    missing_keys: list[str],
    unexpected_keys: list[str],
    path: str = "",
    *,
    after_guess: bool | None = None,
) -> None:
    """Run the hooks that are on this very cell, in the order of their registration: all, or those of one moment."""
    # A list, because a hook may remove itself or others.
    for entry in list(cell.__dict__.get(_ATTRIBUTE, _NO_HOOKS).values()):
        if after_guess is None or entry.after_guess == after_guess:
            entry(cell, IncompatibleKeys(missing_keys, unexpected_keys), path)


def load_hooks_of(cell: nn.Cell) -> list[_Entry]:
    """List the hooks that are on this very cell, for either loader."""
    found = [*cell.__dict__.get(_ATTRIBUTE, _NO_HOOKS).values()]
    found += [one for one in (cell.__dict__.get(_STATE_DICT_ATTRIBUTE) or {}).values() if isinstance(one, _Entry)]
    return [entry for entry in dict.fromkeys(found) if entry.hook is not None]


def hold_hook_point() -> None:
    """Keep the loader changed even while no hook exists.

    Raises:
        UnsupportedError: The installed MindSpore's loader has an unknown form.
    """
    with _lock:
        before, _loader.held = _loader.held, True
        try:
            _sync()
        except BaseException:
            _loader.held = before
            raise


def release_hook_point() -> None:
    """Take off every load hook there is and leave the loader as it was found."""
    with _lock:
        _loader.held = False
        for entry in list(_entries):
            entry.remove()
        _sync()


def native_method() -> Any:
    """MindSpore's own ``Cell.register_load_param_into_net_post_hook`` if it has one, else None."""
    method = getattr(nn.Cell, METHOD, None)
    return None if getattr(method, "__module__", "").startswith("tenterhook.") else method


_lock = threading.RLock()
_ids = itertools.count()
_entries: weakref.WeakSet[_Entry] = weakref.WeakSet()
_NO_HOOKS = _Hooks()
_loader = _Loader()


def _sync() -> None:
    """Change the loader if it is needed changed, else leave it as it was found."""
    if native_method() is None and (_loader.held or bool(_entries)):
        if _loader.point is None:
            _loader.point = choose_hook_point(_after_load)
        _loader.point.apply()
    elif _loader.point is not None:
        _loader.point.undo()
        if not _loader.point.applied:
            _loader.point = None


def _after_load(net: Any, missing_keys: list[str], unexpected_keys: list[str], given: Any, strict: bool) -> None:
    if not _entries:
        return
    cells = list(_children_first(net, "", set()))
    for path, cell in cells:
        run_hooks_of_cell(cell, missing_keys, unexpected_keys, path, after_guess=False)
    late = [one for one in cells if any(entry.after_guess for entry in _hooks_on(one[1]))]
    if late:
        guess_prefixes(net, missing_keys, given, strict)
    for path, cell in late:
        run_hooks_of_cell(cell, missing_keys, unexpected_keys, path, after_guess=True)


def _hooks_on(cell: nn.Cell) -> list[_Entry]:
    return list(cell.__dict__.get(_ATTRIBUTE, _NO_HOOKS).values())


def _children_first(cell: nn.Cell, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Cell]]:
    if id(cell) in seen:
        return
    seen.add(id(cell))
    for name, child in cell.name_cells().items():
        yield from _children_first(child, f"{path}.{name}" if path else name, seen)
    yield path, cell


def _accepts(cell: Any, hook: Any, method: str, stacklevel: int = 3) -> bool:
    """Check the arguments of a registration; False if the mode makes hooks inert."""
    if not isinstance(cell, nn.Cell):
        raise HookError(f"{method} needs a mindspore.nn.Cell, got a {type(cell).__name__}")
    if not callable(hook):
        raise HookError(
            f"{method} on a {type(cell).__name__} needs a callable hook(cell, incompatible_keys), "
            f"got a {type(hook).__name__}"
        )
    if mindspore.get_context("mode") != mindspore.GRAPH_MODE:
        return True
    warnings.warn(
        f"{method}: the load hook {_name(hook)} on a {type(cell).__name__} will never run, since MindSpore is in "
        "GRAPH_MODE; call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) before registering it",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
    return False


def _attach(cell: nn.Cell, hook: Hook) -> _Entry:
    entry = _Entry(hook)
    entry.cell = weakref.ref(cell)
    _entries.add(entry)
    native = native_method()
    if native is not None:
        entry.taken_off.append(native(cell, entry).remove)
        return entry
    try:
        _sync()
    except BaseException:
        _entries.discard(entry)
        raise
    # Past Cell.__setattr__, which has its own ideas about what an attribute means.
    hooks = cell.__dict__.get(_ATTRIBUTE)
    if not isinstance(hooks, _Hooks):
        hooks = cell.__dict__[_ATTRIBUTE] = _Hooks()
    key = next(_ids)
    hooks[key] = entry
    entry.taken_off.append(lambda: _detach(hooks, key, entry.cell))
    return entry


def _detach(hooks: _Hooks, key: int, cell_ref: weakref.ref[Any] | None) -> None:
    hooks.pop(key, None)
    cell = None if cell_ref is None else cell_ref()
    if cell is not None and not hooks and cell.__dict__.get(_ATTRIBUTE) is hooks:
        del cell.__dict__[_ATTRIBUTE]


def _attach_to_state_dict(cell: nn.Cell, entry: _Entry) -> None:
    before = cell.__dict__.get(_STATE_DICT_ATTRIBUTE)
    native = getattr(cell, _STATE_DICT_METHOD)(entry)
    cell_ref = weakref.ref(cell)

    def take_off() -> None:
        native.remove()
        cell = cell_ref()
        # MindSpore makes this dict on first use; an empty one that we caused goes again.
        if before is None and cell is not None and not cell.__dict__.get(_STATE_DICT_ATTRIBUTE):
            cell.__dict__[_STATE_DICT_ATTRIBUTE] = None

    entry.taken_off.append(take_off)


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)
