"""Compiled code, which calls no hooks: run eager for a session's length, and whether that concerns the session's model."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tenterhook.backends._live_objects import instances_of
from tenterhook.backends._switch import Switch
from tenterhook.backends._torch_models import running_modules
from tenterhook.errors import UnsupportedError

__all__ = ["CompiledRuns", "hold_compiler", "is_compiled", "is_under_compiled", "look_for_compiled", "runs", "standing"]

_COMPILER = "torch._dynamo"  # torch imports it when something is compiled for the first time


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is ``torch.compile``'s wrapper, or was compiled in place by ``module.compile()``."""
    call = getattr(module, "_compiled_call_impl", None)
    return (
        type(module).__name__ == "OptimizedModule" or getattr(call, "before", call) is not None
    )  # ours: what was there before


def is_under_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is part of a compiled model; looks for those among all objects where anything is compiled."""
    if not _something_is_compiled():
        return False
    return any(part is module for one in instances_of(nn.Module) if is_compiled(one) for part in one.modules())


class CompiledRuns:
    """Whether a session's model is, contains, or was run by compiled code; once it is so, it stays so.

    Nothing on a model tells that a compiled function calls it. So when such a function runs, eager as it does in a session, its
    thread is noted, and the next hook of ours there looks at who has called its module.

    Args:
        model: of the session; None for all models.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._ref = None if model is None else weakref.ref(model)
        self.found = False if model is None else _is_compiled_in_part(model) or is_under_compiled(model)
        if not self.found:
            _looking[id(self)] = self

    def look(self) -> bool:
        """Whether it is so by now."""
        model = None if self._ref is None else self._ref()
        if not self.found and model is not None and _is_compiled_in_part(model):
            self.found = True
        return self.found

    def ran(self, module: nn.Module) -> None:
        """A module has been called by compiled code, or calls it."""
        model = None if self._ref is None else self._ref()
        if self._ref is None or (model is not None and any(part is module for part in model.modules())):
            self.found = True
            _looking.pop(id(self), None)

    def close(self) -> None:
        """Look no more."""
        _looking.pop(id(self), None)


_looking: weakref.WeakValueDictionary[int, CompiledRuns] = weakref.WeakValueDictionary()


def _all_looking() -> list[CompiledRuns]:
    return [
        one for ref in _looking.valuerefs() if (one := ref()) is not None
    ]  # other threads begin and end sessions meanwhile


runs: dict[int, bool] = {}
"""Threads that have called a compiled function since the last look; not empty is what a hook has to find out."""

standing: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""What stands around the calls of modules where ``module.compile()`` puts what it makes: that displaces it without a word."""


def _put_hooks_back(function: Any) -> None:
    """Have hooks of a module that was compiled in place follow its calls, this one already."""
    module = getattr(function, "__self__", None)
    if isinstance(module, nn.Module):
        for attachment in standing.get(module, ()):
            attachment.give_way_if_displaced()


def _is_compiled_in_part(model: nn.Module) -> bool:
    return any(map(is_compiled, model.modules()))


def look_for_compiled(module: nn.Module) -> None:
    """A module of somebody's session is called, and some thread has called a compiled function: is it that which calls?"""
    if runs.pop(threading.get_ident(), False) and _is_called_by_compiled():
        for one in _all_looking():
            one.ran(module)


def _is_called_by_compiled() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("compile_wrapper", "_fn") and code.co_filename.endswith("eval_frame.py"):
            if callable(frame.f_locals.get("callback")):  # those of functions that are kept from compilation have none
                return True
        frame = frame.f_back
    return False


def _seeing_runs() -> Callable[[], None]:
    """Have calls of compiled functions noted; returns what ends that."""
    compiler: Any = sys.modules[f"{_COMPILER}.eval_frame"]
    choose = compiler._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        if standing and callable(callback):
            _put_hooks_back(sys._getframe(1).f_locals.get("fn"))
        if _looking and callable(callback):
            for module in running_modules():
                for one in _all_looking():
                    one.ran(module)
            runs[threading.get_ident()] = True
        return choose(callback)

    def end() -> None:
        runs.clear()
        if compiler._callback_from_stance is callback_from_stance:
            compiler._callback_from_stance = choose

    compiler._callback_from_stance = callback_from_stance
    return end


def hold_compiler(stack: contextlib.ExitStack, model: nn.Module | None) -> None:
    """Have compiled code run eager until ``stack`` is closed.

    Raises:
        UnsupportedError: this runs inside compiled code.
    """
    if _COMPILER in sys.modules or (model is not None and _is_compiled_in_part(model)):
        _compiler.hold(stack)
        return
    # Importing the compiler takes as long as importing torch; a session does not do it for nothing.
    waiting = _CompilerImport(lambda: _compiler.hold(stack))
    sys.meta_path.insert(0, waiting)
    stack.callback(waiting.stop)


def _compiler_off() -> Callable[[], None]:
    if _in_compiled_code():
        raise UnsupportedError(
            "a session cannot begin inside compiled code\n"
            "  open it around the call of what is compiled; the session has that code run eager"
        )
    set_back = _force_eager()
    try:
        end_seeing = _seeing_runs()
    except BaseException:
        set_back()
        raise

    def end() -> None:
        try:
            end_seeing()
        finally:
            set_back()

    return end


def _in_compiled_code() -> bool:
    """Whether torch would compile the frames that are called from here."""
    compiler = sys.modules.get("torch._C._dynamo.eval_frame")
    return compiler is not None and compiler.get_eval_frame_callback() not in (None, False)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage] - the compiler refuses to meet set_stance
def _force_eager() -> Callable[[], None]:
    stance: Any = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


_compiler = Switch(_compiler_off)


def _something_is_compiled() -> bool:
    """Whether ``torch.compile`` was called in this process, on whatever."""
    compiler = sys.modules.get(f"{_COMPILER}.eval_frame")
    # torch's own functions that are kept from compilation, as those of optimizers are, stand there with no backend
    return any(map(callable, list(getattr(compiler, "cached_backends", {}).values())))


class _CompilerImport(importlib.abc.MetaPathFinder):
    """Waits in ``sys.meta_path``, for a session's length at most, for the import of the compiler."""

    def __init__(self, imported: Callable[[], object]) -> None:
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        self.stop()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def stop(self) -> None:
        with contextlib.suppress(ValueError):  # it has left when the import came
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Loads a module as its real loader does, leaves that in its place, and then says so."""

    def __init__(self, loader: Any, loaded: Callable[[], object]) -> None:
        self._loader = loader
        self._loaded = loaded

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded()
