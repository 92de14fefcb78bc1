"""The places where MindSpore is changed while somebody watches, and only then.

MindSpore has no hooks for all cells, its hooks on single cells are mute or wrong in several cases (shared cells,
nested outputs, cells with a ``bprop``), and nothing in it tells when a backward pass begins. So for a session's time
some of its class attributes are swapped: ``Cell.__call__``, where every call passes; ``_PyNativeExecutor.grad``, which
is the backward pass; ``_JitExecutor.__call__``, where compiled code is entered; and three more that keep the books
right. Each is put back, the very same object, when the last watcher lets go.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from mindspore import context, nn
from mindspore.common.recompute import _RecomputeCell, _WrapCell
from mindspore.experimental.optim import Optimizer as _ExperimentalOptimizer
from mindspore.graph import api as _graph_api
from mindspore.graph.api import _pynative_executor as executor
from mindspore.ops.composite import base as _gradient_functions
from mindspore.ops.function.grad import grad_func as _more_gradient_functions

from tenterhook.backends import After, Before, Failed
from tenterhook.backends._mindspore_passes import begin_pass, end_pass, in_pass, run_after_pass, running_pass

__all__ = ["OPTIMIZERS", "CallHook", "Hold", "Listener", "executor", "put_on"]

_log = logging.getLogger("tenterhook")

OPTIMIZERS: tuple[type, ...] = (nn.Optimizer, _ExperimentalOptimizer)
"""Cells that are optimizers; those of ``mint.optim`` are among the second."""

_PLUMBING = (  # cells that are part of how a model is trained rather than of a model

    *OPTIMIZERS, nn.TrainOneStepCell, nn.WithLossCell, nn.WithEvalCell, nn.WithGradCell, nn.ForwardValueAndGrad,
    nn.DistributedGradReducer, _RecomputeCell, _WrapCell,
)  # fmt: skip

_KEY = "_tenterhook_call_hooks"


# --- who watches ---------------------------------------------------------------------------------------------------
class CallHook:
    """Callbacks around the calls of one cell."""

    __slots__ = ("_cell", "_hold", "after", "before", "failed", "live")

    def __init__(self, cell: nn.Cell, before: Before | None, after: After | None, failed: Failed | None) -> None:
        self._cell = weakref.ref(cell)
        self.before = before
        self.after = after
        self.failed = failed
        self.live = True
        self._hold = Hold()

    def remove(self) -> None:
        """Take it off the cell. A second call does nothing."""
        if not self.live:
            return
        self.live = False
        cell = self._cell()
        if cell is not None:
            table = cell.__dict__[_KEY]
            table.hooks.remove(self)
            if not table.hooks:
                del cell.__dict__[_KEY]
        self._hold.release()


class _Table:
    """The hooks of one cell, in its ``__dict__``, so that they go when it goes; copies of the cell carry none."""

    __slots__ = ("hooks",)

    def __init__(self) -> None:
        self.hooks: list[CallHook] = []

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (dict, ())


def put_on(
    cell: nn.Cell, before: Before | None, after: After | None, failed: Failed | None, *, first: bool
) -> CallHook:
    """Put callbacks around every call of ``cell``."""
    hook = CallHook(cell, before, after, failed)
    table = cell.__dict__.get(_KEY)
    if not isinstance(table, _Table):
        table = cell.__dict__[_KEY] = _Table()  # past Cell.__setattr__, which has its own ideas about attributes
    table.hooks.insert(0 if first else len(table.hooks), hook)
    return hook


class Listener:
    """A function that hears of every call (``calls``) or of every optimizer step (``steps``) of the process."""

    __slots__ = ("_hold", "_list", "fn", "live")

    def __init__(self, what: str, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.live = True
        self._list: list[Listener] = _state.calls if what == "calls" else _state.steps
        self._hold = Hold(eager=what == "calls")
        self._list.append(self)

    def remove(self) -> None:
        """Stop listening. A second call does nothing."""
        if self.live:
            self.live = False
            self._list.remove(self)
            self._hold.release()


class _State:
    """Who watches now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holds = 0
        self.eager = 0  # of these, the ones for whom compiled code is to run eager
        self.calls: list[Listener] = []
        self.steps: list[Listener] = []
        self.told_of: set[str] = set()
        self.forwards: dict[int, int] = {}  # thread -> depth of functions that are being differentiated
        self.quiet: dict[int, list[Any]] = {}  # thread -> training cells that are running


class Hold:
    """Keeps the seams open; lets go when released, or when it dies with the cell that it belongs to."""

    __slots__ = ("_eager", "_open")

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._open = True
        with _state.lock:
            _state.holds += 1
            _state.eager += eager
            for swap in _swaps:
                swap.on()

    def release(self) -> None:
        """Let go. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        with _state.lock:
            _state.holds -= 1
            _state.eager -= self._eager
            if not _state.holds:
                _state.told_of.clear()
                for swap in _swaps:
                    swap.off()
        if not in_pass():
            run_after_pass()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


# --- the seams -----------------------------------------------------------------------------------------------------
class _Swap:
    """One attribute that is swapped while somebody watches."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._make = make
        self._original: Any = None
        self._ours: Any = None

    def on(self) -> None:
        """Swap, unless that is done already."""
        if self._ours is None:
            self._original = vars(self._owner)[self._name]
            self._ours = functools.wraps(self._original)(self._make(self._original))
            setattr(self._owner, self._name, self._ours)

    def off(self) -> None:
        """Put the original back; where somebody else has swapped after us, ours stays beneath theirs and does nothing."""
        if self._ours is not None and vars(self._owner)[self._name] is self._ours:
            setattr(self._owner, self._name, self._original)
            self._original = self._ours = None


def _cell_call(original: Any) -> Any:
    def __call__(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        table = self.__dict__.get(_KEY)
        if not (table or _state.calls or _state.steps):
            return original(self, *args, **kwargs)
        return _observed(original, self, args, kwargs)

    return __call__


def _observed(original: Any, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooks = _hooks(cell)
    if _state.calls or _state.steps:
        if isinstance(cell, _PLUMBING):
            return _trained(original, cell, args, kwargs)
        if _state.calls and not _is_quiet(cell):
            for listener in tuple(_state.calls):
                listener.fn(cell, args, kwargs)
    output: Any = None
    done: set[CallHook] = set()
    try:
        for hook in hooks:
            if hook.before is not None and hook.live:
                new = hook.before(cell, args, kwargs)
                if new is not None:
                    args, kwargs = new
        output = original(cell, *args, **kwargs)
        if cell._compiled and context._get_mode() == context.GRAPH_MODE:
            _tell_once(
                f"{type(cell).__name__} ran in graph mode: compiled code calls no hooks, what is inside was not seen"
            )
        for hook in _hooks(cell):
            if hook.after is not None and hook.live:
                done.add(hook)
                new = hook.after(cell, args, kwargs, output)
                if new is not None:
                    output = new
    except Exception as error:
        _tell_of_failure(cell, args, kwargs, output, error, done)
        raise
    return output


def _hooks(cell: nn.Cell) -> tuple[CallHook, ...]:
    table = cell.__dict__.get(_KEY)
    return tuple(table.hooks) if table else ()


def _tell_of_failure(
    cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, error: Exception, done: set[CallHook]
) -> None:
    for hook in _hooks(cell):
        if hook.failed is None or hook in done:
            continue
        try:
            if output is None:
                hook.failed(cell, args, kwargs, error)
            elif hook.after is not None:
                hook.after(cell, args, kwargs, output)
        except Exception as another:  # the error of the call wins
            warnings.warn(
                f"a hook on {type(cell).__name__} raised {type(another).__name__}: {another}; the call itself had failed before",
                RuntimeWarning,
                stacklevel=4,
            )


def _trained(original: Any, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a cell of the training machinery: what it calls for itself is no model, and an optimizer ends a step."""
    running = _state.quiet.setdefault(threading.get_ident(), [])
    running.append(cell)
    try:
        output = original(cell, *args, **kwargs)
    finally:
        running.pop()
    if isinstance(cell, OPTIMIZERS):
        for listener in tuple(_state.steps):
            listener.fn(cell)
    return output


def _is_quiet(cell: nn.Cell) -> bool:
    running = _state.quiet.get(threading.get_ident())
    if not running:
        return False
    return isinstance(running[-1], OPTIMIZERS) or cell is getattr(running[-1], "grad_reducer", None)


def _gradient(original: Any) -> Any:
    def grad(self: Any, *args: Any) -> Any:
        outer = running_pass()
        if outer is not None and outer.recomputing:
            return original(self, *args)
        this = begin_pass()
        try:
            result = original(self, *args)
            while this.at_end:
                this.at_end.pop(0)()
            return result
        finally:
            end_pass()

    return grad


def _recomputing(original: Any) -> Any:
    def set_is_run_recompute(self: Any, flag: bool) -> Any:
        this = running_pass()
        if this is not None:
            this.recomputing = flag
        return original(self, flag)

    return set_is_run_recompute


def _compiled_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _state.eager or _is_frameworks_own(self):
            return original(self, *args, **kwargs)
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        _tell_once(f"{name} is compiled by ms.jit; it runs eager while it is watched: compiled code calls no hooks")
        cell = self.obj
        if isinstance(cell, nn.Cell) and self.fn.__name__ == "construct" and not _is_called(cell):
            return cell(*args[1:], **kwargs)
        return self.fn(*args, **kwargs)

    return __call__


def _is_frameworks_own(compiled: Any) -> bool:
    """Whether MindSpore compiled this for itself (the arithmetic of optimizers, say): no cell of the user's is in it."""
    if isinstance(compiled.obj, nn.Cell):
        return isinstance(compiled.obj, _PLUMBING)
    return compiled.fn.__module__.partition(".")[0] == "mindspore"


def _tell_once(sentence: str) -> None:
    if sentence not in _state.told_of:
        _state.told_of.add(sentence)
        _log.warning(sentence)


def _is_called(cell: nn.Cell) -> bool:
    """Whether compiled code was entered from the call of its cell, and not past it (``ms.jit(net)``)."""
    frame = sys._getframe(3)  # this, the swapped call, the wrapper that jit has made, its caller
    return frame.f_globals.get("__name__") == nn.Cell.__module__ and frame.f_locals.get("self") is cell


def _differentiated(original: Any) -> Any:
    def forward(fn: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        depth = _state.forwards.get(thread, 0)
        _state.forwards[thread] = depth + 1
        flag = fn.requires_grad if isinstance(fn, nn.Cell) else None
        try:
            return original(fn, *args, **kwargs)
        except BaseException:
            # MindSpore goes on recording after an exception, and indexing is broken from then on
            if flag is not None:
                fn.requires_grad = flag
            if depth == 0:
                executor.clear_res()
            raise
        finally:
            if depth:
                _state.forwards[thread] = depth
            else:
                _state.forwards.pop(thread, None)

    return forward


_state = _State()
_swaps = (
    _Swap(nn.Cell, "__call__", _cell_call),
    _Swap(type(executor), "grad", _gradient),
    _Swap(type(executor), "set_is_run_recompute", _recomputing),
    _Swap(_graph_api._JitExecutor, "__call__", _compiled_call),
    _Swap(_gradient_functions, "_pynative_func_grad_forward", _differentiated),
    _Swap(_more_gradient_functions, "_pynative_func_grad_forward", _differentiated),
)
