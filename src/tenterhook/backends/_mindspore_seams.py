"""The places where MindSpore is changed while somebody watches, and only then.

MindSpore has no hooks for all cells, its hooks on single cells are mute or wrong in several cases (shared cells,
nested outputs, cells with a ``bprop``), and nothing in it tells when a backward pass begins. So for a session's time
some of its class attributes are swapped: ``Cell.__call__``, where every call passes; ``_PyNativeExecutor.grad``, which
is the backward pass; ``_JitExecutor.__call__``, where compiled code is entered; the other ways into compiled code; and three more that
keep the books right. Each is put back, the very same object, when the last watcher lets go.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from types import FrameType, FunctionType, MethodType
from typing import Any

from mindspore import context, nn
from mindspore.common.recompute import _RecomputeCell, _WrapCell
from mindspore.experimental.optim import Optimizer as _ExperimentalOptimizer
from mindspore.graph import api as _graph_api
from mindspore.graph import jit_trace as _jit_trace
from mindspore.graph._utils.pijit_context import PIJitCaptureContext as _BytecodeCapture
from mindspore.graph.api import _pynative_executor as executor
from mindspore.ops.composite import base as _gradient_functions
from mindspore.ops.function.grad import grad_func as _more_gradient_functions

from tenterhook.backends import Instead
from tenterhook.backends._mindspore_checkpoint import Region, forget_regions
from tenterhook.backends._mindspore_in_place import Stepped
from tenterhook.backends._mindspore_offers import offer, offer_together
from tenterhook.backends._mindspore_passes import begin_pass, end_pass, running_pass
from tenterhook.backends._mindspore_watching import KEY, STATE, SWAPS, CallHook, Hold, Swap, hooks_of, tell_once

__all__ = ["OPTIMIZERS", "executor", "is_differentiating", "is_nested", "running_cells"]

OPTIMIZERS: tuple[type, ...] = (nn.Optimizer, _ExperimentalOptimizer)
"""Cells that are optimizers; those of ``mint.optim`` are among the second."""

_PLUMBING = (  # cells that are part of how a model is trained rather than of a model
    *OPTIMIZERS, nn.TrainOneStepCell, nn.WithLossCell, nn.WithEvalCell, nn.WithGradCell, nn.ForwardValueAndGrad,
    nn.DistributedGradReducer, _RecomputeCell, _WrapCell,
)  # fmt: skip


_RUNS_EAGER = "{} is compiled by ms.jit; it runs eager while it is watched: compiled code calls no hooks"


_CALL = getattr(vars(nn.Cell)["__call__"], "__code__", None)


# --- the seams -----------------------------------------------------------------------------------------------------
def _cell_call(original: Any) -> Any:
    def __call__(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        if not (KEY in self.__dict__ or STATE.listens):
            return original(self, *args, **kwargs)
        return _observed(original, self, args, kwargs)

    return __call__


def _observed(original: Any, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    instead = [hook.instead for hook in hooks_of(cell) if hook.instead is not None]
    if not instead:
        return _hooked(original, cell, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _hooked(original, cell, args, kwargs)

    for function in instead:
        call = functools.partial(_bypassed, function, call)
    return call(*args, **kwargs)


def _bypassed(instead: Instead, call: Any, *args: Any, **kwargs: Any) -> Any:
    return instead(call, args, kwargs)


def _hooked(original: Any, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooks = hooks_of(cell)
    if STATE.listens:
        if isinstance(cell, _PLUMBING):
            return _trained(original, cell, args, kwargs)
        if STATE.calls and not _is_quiet(cell):
            for listener in tuple(STATE.calls):
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
            tell_once(
                f"{type(cell).__name__} ran in graph mode: compiled code calls no hooks, what is inside was not seen"
            )
        for hook in hooks_of(cell):
            if hook.after is not None and hook.live:
                done.add(hook)
                new = hook.after(cell, args, kwargs, output)
                if new is not None:
                    output = new
    except Exception as error:
        _tell_of_failure(cell, args, kwargs, output, error, done)
        raise
    return output


def _tell_of_failure(
    cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, error: Exception, done: set[CallHook]
) -> None:
    for hook in hooks_of(cell):
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
    running = STATE.quiet.setdefault(threading.get_ident(), [])
    step = None
    if isinstance(cell, OPTIMIZERS):
        if not any(isinstance(other, OPTIMIZERS) for other in running):
            args = offer(cell, args)
        args = offer_together(cell, args, functools.partial(_step_comes, cell))
        step = Stepped(cell, args[0] if args else None)
    running.append(cell)
    try:
        output = original(cell, *args, **kwargs)
    finally:
        running.pop()
    if step is not None:
        step.tell()
        for listener in tuple(STATE.steps):
            listener.fn(cell)
    return output


def _step_comes(optimizer: nn.Cell) -> None:
    for listener in tuple(STATE.steps_to_come):
        listener.fn(optimizer)


def _is_quiet(cell: nn.Cell) -> bool:
    running = STATE.quiet.get(threading.get_ident())
    if not running:
        return False
    return isinstance(running[-1], OPTIMIZERS) or cell is getattr(running[-1], "grad_reducer", None)


def _gradient(original: Any) -> Any:
    def grad(self: Any, *args: Any) -> Any:
        outer = running_pass()
        if outer is not None and outer.recomputing:
            outer.end_rerun()
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
            if flag:
                this.begin_rerun()
            else:
                this.end_rerun()
        return original(self, flag)

    return set_is_run_recompute


def _compiled_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not STATE.eager:
            return original(self, *args, **kwargs)
        if _is_frameworks_own(self):
            _tell_of_transform(self.fn)
            return original(self, *args, **kwargs)
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        tell_once(_RUNS_EAGER.format(name))
        cell = self.obj
        if isinstance(cell, nn.Cell) and self.fn.__name__ == "construct" and not _is_called(cell):
            return cell(*args[1:], **kwargs)
        return self.fn(*args, **kwargs)

    return __call__


def _bytecode_capture(original: Any) -> Any:
    def __enter__(self: Any) -> Any:
        if not STATE.eager:
            return original(self)
        tell_once(_RUNS_EAGER.format(getattr(self.fn, "__qualname__", repr(self.fn))))
        return self  # without the capture of bytecode, what is in the context runs as it is written

    return __enter__


def _trace_begin(original: Any) -> Any:
    def begin(fn_name: str, *args: Any, **kwargs: Any) -> Any:
        name = fn_name.partition("#")[0].rpartition(".")[2]
        tell_once(f"{name} is compiled by ms.jit from a trace: after its first run nothing in it is seen")
        return original(fn_name, *args, **kwargs)

    return begin


def _is_frameworks_own(compiled: Any) -> bool:
    """Whether MindSpore compiled this for itself (the arithmetic of optimizers, say): no cell of the user's is in it."""
    if isinstance(compiled.obj, nn.Cell):
        return isinstance(compiled.obj, _PLUMBING)
    return compiled.fn.__module__.partition(".")[0] == "mindspore"


def _tell_of_transform(fn: Any) -> None:
    """Say so where MindSpore has compiled the user's function inside one of its own: ``vmap``, ``jvp``, ``jacrev``, ``jacfwd``."""
    inside = _users_function_in(fn, depth=2)
    if inside is not None:
        transform = fn.__qualname__.partition(".")[0].strip("_").lower()
        name = getattr(inside, "__qualname__", type(inside).__name__)
        tell_once(f"{transform} compiles {name}: compiled code calls no hooks, what is inside was not seen")


def _users_function_in(fn: Any, depth: int) -> Any:
    held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    functions = [one for one in held if isinstance(one, (FunctionType, MethodType, nn.Cell))]
    for one in functions:
        if isinstance(one, nn.Cell) or not one.__module__.startswith("mindspore."):
            return one
    found = (_users_function_in(one, depth - 1) for one in functions) if depth > 1 else ()
    return next((one for one in found if one is not None), None)


def running_cells() -> list[nn.Cell]:
    """List the cells whose calls are running in this thread, innermost first."""
    ours = getattr(vars(nn.Cell)["__call__"], "__code__", None)
    found: list[nn.Cell] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        back = frame.f_back
        # a call that began before we came is in the original's frame only, others are in ours and maybe in both
        if frame.f_code is ours or (
            frame.f_code is _CALL and (back is None or back.f_globals.get("__name__") != __name__)
        ):
            found.append(frame.f_locals["self"])
        frame = back
    return found


def is_differentiating() -> bool:
    """Whether this code runs in the forward of a function that is being differentiated."""
    return threading.get_ident() in STATE.forwards


def is_nested() -> bool:
    """Whether this code runs in the forward of a gradient function that is being differentiated itself."""
    return STATE.forwards.get(threading.get_ident(), 0) > 1


def _is_called(cell: nn.Cell) -> bool:
    """Whether compiled code was entered from the call of its cell, and not past it (``ms.jit(net)``)."""
    frame = sys._getframe(3)  # this, the swapped call, the wrapper that jit has made, its caller
    return frame.f_globals.get("__name__") == nn.Cell.__module__ and frame.f_locals.get("self") is cell


def _differentiated(original: Any) -> Any:
    def forward(fn: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        depth = STATE.forwards.get(thread, 0)
        STATE.forwards[thread] = depth + 1
        try:
            if isinstance(fn, nn.Cell):
                return _as_function(fn, args, kwargs)
            return original(fn, *args, **kwargs)
        except BaseException:
            # MindSpore goes on recording after an exception, and indexing is broken from then on
            if depth == 0:
                executor.clear_res()
                forget_regions()
            raise
        finally:
            if depth:
                STATE.forwards[thread] = depth
            else:
                STATE.forwards.pop(thread, None)

    return forward


def _as_function(cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate a cell as MindSpore does any other function.

    It marks the cell instead, which then begins the graph inside its call: what hooks before the call compute is no part of
    it, and the gradient of what they give the cell is not that of what they were given.
    """
    known, result = executor.check_run(cell, *args, **kwargs)
    if known:
        return result
    executor.set_grad_flag(True)
    executor.new_graph(cell, *args, **kwargs)
    flag, cell.requires_grad = cell.requires_grad, False
    try:
        result = cell(*args, **kwargs)
    finally:
        cell.requires_grad = flag
    executor.end_graph(cell, result, *args, **kwargs)
    return result


SWAPS += [
    Swap(nn.Cell, "__call__", _cell_call),
    Swap(type(executor), "grad", _gradient),
    Swap(type(executor), "set_is_run_recompute", _recomputing),
    Swap(_graph_api._JitExecutor, "__call__", _compiled_call),
    Swap(_BytecodeCapture, "__enter__", _bytecode_capture),
    Swap(_jit_trace, "_jit_trace_begin", _trace_begin),
    Swap(_gradient_functions, "_pynative_func_grad_forward", _differentiated),
    Swap(_more_gradient_functions, "_pynative_func_grad_forward", _differentiated),
]
Region.hold = Hold
