"""Ways past the hooks that torch takes for speed, closed for a session's length: fused transformer layers and compiled code."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tenterhook.backends._switch import Switch
from tenterhook.backends._torch_checkpoint import seeing_reentry
from tenterhook.backends._torch_compiled import CompiledRuns, hold_compiler
from tenterhook.backends._torch_copying import copying_without_hooks
from tenterhook.backends._torch_registering import seeing_registration
from tenterhook.backends._torch_scripting import scripting_without_hooks
from tenterhook.backends._types import FUSED_OFF

__all__ = ["closed_fast_paths"]

_COMPILED = "compiled code runs eager in the session: compiled code does not call hooks"


@contextlib.contextmanager
def closed_fast_paths(model: nn.Module | None) -> Iterator[Sequence[str]]:
    """Close them, and yield sentences that say what was changed; some are added only at the end.

    All compiled code of the process runs eager: the model's own, a compiled function that calls it, and what is compiled
    in the meantime, which would be traced with our hooks in it and keep calling them after the session. Code that was
    compiled before is kept, and used again afterwards.

    Raises:
        UnsupportedError: this runs inside compiled code.
    """
    modules = () if model is None else tuple(model.modules())
    fused = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    with contextlib.ExitStack() as stack:
        hold_compiler(stack, model)  # the first of all: it refuses where what follows would be compiled itself
        told = _Told(CompiledRuns(model))
        _registration.hold(stack)
        _scripting.hold(stack)
        _copying.hold(stack)
        _reentry.hold(stack)
        if any(isinstance(module, fused) for module in modules) and _fused_path.hold(stack):
            told.fused = [weakref.ref(module) for module in modules if isinstance(module, fused)]
        told.look()
        del model, modules  # a suspended frame would keep them alive
        try:
            yield told
        finally:
            told.look()
            told.fused = []
            told.compiled.close()


class _Told(Sequence[str]):
    """What is said of a session; of the fused path once a module that can take it was seen in evaluation: training never does."""

    def __init__(self, compiled: CompiledRuns) -> None:
        self.said: list[str] = []
        self.compiled = compiled
        self.fused: list[weakref.ref[nn.Module]] = []

    def look(self) -> None:
        if any((module := ref()) is not None and not module.training for ref in self.fused):
            self.fused = []
            self.said.insert(0, FUSED_OFF)
        if _COMPILED not in self.said and self.compiled.look():
            self.said.append(_COMPILED)

    def __len__(self) -> int:
        self.look()
        return len(self.said)

    def __getitem__(self, place: Any) -> Any:
        self.look()
        return self.said[place]


def _fused_path_off() -> Callable[[], None] | None:
    if not torch.backends.mha.get_fastpath_enabled():
        return None
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(True)


_fused_path = Switch(_fused_path_off)
_reentry = Switch(seeing_reentry)
_registration = Switch(seeing_registration)
_scripting = Switch(scripting_without_hooks)
_copying = Switch(copying_without_hooks)
