"""Lists the hooks that are on a torch model, whoever put them there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module_registries

from tenterhook.backends import InstalledHook
from tenterhook.backends import _torch_models as models
from tenterhook.backends._installed import callbacks_on, is_ours, record
from tenterhook.backends._torch_native import hooks_around
from tenterhook.backends._torch_registering import NotYet

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
    for path, _, module, is_wrapper in models.walk(model):
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
        for kind, hook in hooks_around(value).items():
            yield _record(path, kind, hook, note)
        if name in ("forward", "__call__") or (is_ours(value) and callable(value) and not hooks_around(value)):
            for hook in callbacks_on(value):
                yield _record(path, f"replaced {name}", hook, note)


def _taps(hook: Any) -> list[Any]:
    """The callbacks behind the one hook that the backend keeps on a tensor."""
    return [tap.fn for tap in hook.taps] if is_ours(hook) and hasattr(hook, "taps") else [hook]


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
    wraps = type(hook) is NotYet or type(hook).__name__ == "_WrappedHook"
    return record(path, kind, getattr(hook, "hook", hook) if wraps else hook, note)
