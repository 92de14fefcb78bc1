"""Lists the hooks that are on a torch model, whoever put them there."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module_registries

from tenterhook.backends import InstalledHook
from tenterhook.backends import _torch_models as models

__all__ = ["list_hooks"]

_TABLES = {
    "_forward_pre_hooks": "forward_pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "backward_pre",
    "_backward_hooks": "backward",
    "_state_dict_pre_hooks": "state_dict_pre",
    "_state_dict_hooks": "state_dict",
    "_load_state_dict_pre_hooks": "load_pre",
    "_load_state_dict_post_hooks": "load",
}
_OPTIMIZER_TABLES = {
    "_optimizer_step_pre_hooks": "optimizer_step_pre",
    "_optimizer_step_post_hooks": "optimizer_step",
    "_optimizer_state_dict_pre_hooks": "optimizer_state_dict_pre",
    "_optimizer_state_dict_post_hooks": "optimizer_state_dict",
    "_optimizer_load_state_dict_pre_hooks": "optimizer_load_pre",
    "_optimizer_load_state_dict_post_hooks": "optimizer_load",
}
_optimizer_registries = sys.modules[torch.optim.Optimizer.__module__]
_EVERY_MODULE = "(every module)"
_EVERY_OPTIMIZER = "(every optimizer)"


def list_hooks(model: nn.Module) -> list[InstalledHook]:
    found: list[InstalledHook] = []
    blind = models.blind_spots(model)
    seen: set[int] = set()
    for path, _, module, is_wrapper in models._walk(model):
        if id(module) in seen:
            continue
        seen.add(id(module))
        note = blind.get(path, "")
        if isinstance(module, torch.jit.ScriptModule):
            note = "script modules run no Python hooks"
        name = f"{path or '(root)'} ({type(module).__name__})" if is_wrapper else path
        found += _of_module(name, module, note)
    for entry in models.list_parameters(model):
        found += _of_tensor(entry.name, entry.parameter)
    found += _of_optimizers(model)
    for table, hooks in vars(_module_registries).items():
        if table.startswith("_global_") and table.endswith("_hooks") and isinstance(hooks, Mapping):
            kind = table.removeprefix("_global_").removesuffix("_hooks")
            found += [_record(_EVERY_MODULE, kind, hook) for hook in hooks.values()]
    for table, kind in (("pre", "optimizer_step_pre"), ("post", "optimizer_step")):
        hooks = getattr(_optimizer_registries, f"_global_optimizer_{table}_hooks", {})
        found += [_record(_EVERY_OPTIMIZER, kind, hook) for hook in hooks.values()]
    return found


def _of_module(path: str, module: nn.Module, note: str) -> Iterator[InstalledHook]:
    for table, kind in _TABLES.items():
        for hook in (getattr(module, table, None) or {}).values():
            if kind == "backward" and not getattr(module, "_is_full_backward_hook", True):
                yield _record(path, "backward (legacy)", hook, note)
            else:
                yield _record(path, kind, hook, note)
    for name, value in vars(module).items():
        if name in ("forward", "__call__") or (_is_ours(value) and callable(value)):
            for hook in _callbacks(value):
                yield _record(path, f"replaced {name}", hook, note)


def _callbacks(function: Any) -> list[Any]:
    """The callbacks on a function that tenterhook wraps, or the function that somebody put in the place of a method."""
    patch = getattr(function, "_self_wrapper", None)
    return [function] if patch is None or not _is_ours(patch) else [*patch.before, *patch.after]


def _taps(hook: Any) -> list[Any]:
    """The callbacks behind the one hook that the backend keeps on a tensor."""
    return [tap.fn for tap in hook.taps] if _is_ours(hook) and hasattr(hook, "taps") else [hook]


def _of_tensor(name: str, tensor: torch.Tensor) -> Iterator[InstalledHook]:
    note = "hooks on sharded parameters never fire" if type(tensor).__name__ == "DTensor" else ""
    for hook in (tensor._backward_hooks or {}).values():
        for one in _taps(hook):
            yield _record(name, "tensor", one, note)
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        yield _record(name, "post_accumulate_grad", hook)


def _of_optimizers(model: nn.Module) -> Iterator[InstalledHook]:
    parameters = {id(parameter) for parameter in model.parameters()}
    for candidate in gc.get_objects():
        # type() and not isinstance(): isinstance would run __class__ properties of foreign proxies
        if not issubclass(type(candidate), torch.optim.Optimizer):
            continue
        groups = getattr(candidate, "param_groups", ())
        if any(id(parameter) in parameters for group in groups for parameter in group["params"]):
            for table, kind in _OPTIMIZER_TABLES.items():
                for hook in (getattr(candidate, table, None) or {}).values():
                    yield _record(f"({type(candidate).__name__})", kind, hook)


def _record(path: str, kind: str, hook: Any, note: str = "") -> InstalledHook:
    hook = getattr(hook, "hook", hook) if type(hook).__name__ == "_WrappedHook" else hook
    ours = _is_ours(hook)
    site = _site_of(hook) if ours else None
    function = hook if site is None else site.fn
    name = "(recording)" if ours and site is None else _name_of(function)
    alive = not note
    if site is not None:
        if not site.live:
            alive, note = False, "removed; stays until checkpointing has repeated its edits"
        elif not note and site.kind != kind:
            note = f"for {site.kind}"
    return InstalledHook(
        path, kind, name, _source_of(function), "tenterhook" if ours else _package_of(function), alive, note, hook,
    )  # fmt: skip


def _is_ours(hook: Any) -> bool:
    hook = _innermost(hook)
    return any(_package(getattr(one, "__module__", None)) == "tenterhook" for one in (type(hook), hook))


def _site_of(hook: Any) -> Any:
    """Find the record of the user's callback behind a hook of ours; None for a recording's."""
    parts: list[Any] = [hook, *(getattr(hook, name, None) for name in ("before", "after", "failed", "fn"))]
    parts += [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    for part in parts:
        for one in (part, getattr(part, "__self__", None)):
            if (site := getattr(one, "site", None)) is not None:
                return site
    return None


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"partial({_name_of(function.func)})"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _source_of(function: Any) -> str | None:
    function = _innermost(function)
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = getattr(function, "__wrapped__", None) or type(function).__call__
    code = getattr(function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _package_of(function: Any) -> str:
    function = _innermost(function)
    return _package(getattr(function, "__module__", None) or type(function).__module__) or "other"


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
