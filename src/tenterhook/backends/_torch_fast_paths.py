"""Ways past the hooks that torch takes for speed, closed for a session's length: fused transformer layers and compiled code."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tenterhook.backends._torch_checkpoint import seeing_reentry
from tenterhook.backends._torch_native import seeing_registration
from tenterhook.backends._torch_scripting import scripting_without_hooks
from tenterhook.backends._types import FUSED_OFF
from tenterhook.errors import UnsupportedError

__all__ = ["closed_fast_paths", "is_compiled", "is_under_compiled"]

_COMPILED = "compiled code runs eager in the session: compiled code does not call hooks"
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
    for candidate in gc.get_objects():
        # type() and not isinstance(): isinstance would run __class__ properties of foreign proxies
        if issubclass(type(candidate), nn.Module) and is_compiled(candidate):
            if any(part is module for part in candidate.modules()):
                return True
    return False


@contextlib.contextmanager
def closed_fast_paths(model: nn.Module | None) -> Iterator[Sequence[str]]:
    """Close them, and yield sentences that say what was changed; some are added only at the end.

    All compiled code of the process runs eager: the model's own, a compiled function that calls it, and what is compiled
    in the meantime, which would be traced with our hooks in it and keep calling them after the session. Code that was
    compiled before is kept, and used again afterwards.

    Raises:
        UnsupportedError: this runs inside compiled code.
    """
    told = _Told()
    modules = () if model is None else tuple(model.modules())
    fused = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    with contextlib.ExitStack() as stack:
        _registration.hold(stack)
        _scripting.hold(stack)
        _reentry.hold(stack)
        if any(isinstance(module, fused) for module in modules) and _fused_path.hold(stack):
            told.fused = [weakref.ref(module) for module in modules if isinstance(module, fused)]
        if _COMPILER in sys.modules or any(map(is_compiled, modules)):
            _compiler.hold(stack)
        else:
            # Importing the compiler takes as long as importing torch; a session does not do it for nothing.
            waiting = _CompilerImport(lambda: _compiler.hold(stack))
            sys.meta_path.insert(0, waiting)
            stack.callback(waiting.stop)
        if _something_is_compiled():
            told.said.append(_COMPILED)
        told.look()
        del model, modules  # a suspended frame would keep them alive
        yield told
        told.look()
        told.fused = []
        if _COMPILED not in told.said and _something_is_compiled():
            told.said.append(_COMPILED)


class _Told(Sequence[str]):
    """What is said of a session; of the fused path once a module that can take it was seen in evaluation: training never does."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fused: list[weakref.ref[nn.Module]] = []

    def look(self) -> None:
        if any((module := ref()) is not None and not module.training for ref in self.fused):
            self.fused = []
            self.said.insert(0, FUSED_OFF)

    def __len__(self) -> int:
        self.look()
        return len(self.said)

    def __getitem__(self, place: Any) -> Any:
        self.look()
        return self.said[place]


class _Switch:
    """A switch of the process that several sessions hold at a time, closed in any order: the last one sets it back."""

    def __init__(self, set_off: Callable[[], Callable[[], None] | None]) -> None:
        self._set_off = set_off
        self._set_back: Callable[[], None] | None = None
        self._holders = 0
        self._lock = threading.Lock()

    def hold(self, stack: contextlib.ExitStack) -> bool:
        """Switch off until ``stack`` is closed; False where it was off already, by somebody else's hand."""
        with self._lock:
            if not self._holders:
                self._set_back = self._set_off()
            self._holders += 1
            stack.callback(self._release)
            return self._set_back is not None

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._set_back is not None:
                set_back, self._set_back = self._set_back, None
                set_back()


def _fused_path_off() -> Callable[[], None] | None:
    if not torch.backends.mha.get_fastpath_enabled():
        return None
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(True)


def _compiler_off() -> Callable[[], None]:
    if _in_compiled_code():
        raise UnsupportedError(
            "a session cannot begin inside compiled code\n"
            "  open it around the call of what is compiled; the session has that code run eager"
        )
    return _force_eager()


def _in_compiled_code() -> bool:
    """Whether torch would compile the frames that are called from here."""
    compiler = sys.modules.get("torch._C._dynamo.eval_frame")
    return compiler is not None and compiler.get_eval_frame_callback() not in (None, False)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage] - the compiler refuses to meet set_stance
def _force_eager() -> Callable[[], None]:
    stance: Any = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


_fused_path = _Switch(_fused_path_off)
_compiler = _Switch(_compiler_off)
_reentry = _Switch(seeing_reentry)
_registration = _Switch(seeing_registration)
_scripting = _Switch(scripting_without_hooks)


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
