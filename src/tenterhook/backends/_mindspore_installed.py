"""Lists the hooks that are on a MindSpore model, whoever put them there.

MindSpore keeps the hooks that others put on tensors and parameters where Python cannot read them: those are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore
from mindspore import context, nn
from mindspore.nn import cell as _registries

from tenterhook.backends import InstalledHook
from tenterhook.backends import _mindspore_models as models
from tenterhook.backends._installed import callbacks_on, is_ours, record
from tenterhook.backends._mindspore_load import load_hooks_of
from tenterhook.backends._mindspore_taps import taps_on
from tenterhook.backends._mindspore_watching import STATE, hooks_of

__all__ = ["list_hooks"]

_TABLES = {
    "_lazy_forward_pre_hook": "forward_pre",
    "_lazy_forward_hook": "forward",
    "_lazy_backward_pre_hook": "backward_pre",
    "_lazy_backward_hook": "backward",
    "_lazy_state_dict_pre_hooks": "state_dict_pre",
    "_lazy_state_dict_hooks": "state_dict",
    "_lazy_load_state_dict_pre_hooks": "load_pre",
    "_lazy_load_state_dict_post_hooks": "load",
}
_SINGLE = {"_saved_tensors_pack_hook": "saved_tensors_pack", "_saved_tensors_unpack_hook": "saved_tensors_unpack"}
_ON_CALLS = frozenset({"forward_pre", "forward", "backward_pre", "backward"})
_EVERY_CELL = "(every cell)"
_EVERY_OPTIMIZER = "(every optimizer)"
_GRAPH = "graph mode: compiled code calls no hooks"


def list_hooks(model: nn.Cell, blind: dict[str, str]) -> list[InstalledHook]:
    """List them: those of cells and of parameters, of the model's optimizers, and of the whole process.

    Args:
        model: the outermost cell.
        blind: path -> why hooks there are not called.
    """
    found: list[InstalledHook] = []
    seen: set[int] = set()
    graph = _GRAPH if context.get_context("mode") == context.GRAPH_MODE else ""
    for path, _, cell, is_wrapper in models.walk(model):
        if id(cell) not in seen:
            seen.add(id(cell))
            name = f"{path or '(root)'} ({type(cell).__name__})" if is_wrapper else path
            found += _of_cell(name, cell, blind.get(path, graph))
    for entry in models.list_parameters(model):
        found += _of_parameter(entry.name, entry.parameter)
    for optimizer in models.optimizers_of(model):
        found += _of_cell(f"({type(optimizer).__name__})", optimizer, graph)
    found += [record(_EVERY_CELL, "call", listener) for listener in STATE.calls]
    found += [record(_EVERY_OPTIMIZER, "optimizer_step_pre", listener) for listener in STATE.steps_to_come]
    found += [record(_EVERY_OPTIMIZER, "optimizer_step", listener) for listener in STATE.steps]
    hooks = getattr(_registries, "_global_buffer_registration_hooks", {})
    return found + [record(_EVERY_CELL, "buffer_registration", hook) for hook in hooks.values()]


def _of_cell(path: str, cell: nn.Cell, note: str) -> Iterator[InstalledHook]:
    for table, kind in _TABLES.items():
        for hook in (vars(cell).get(table) or {}).values():
            if not is_ours(hook):  # ours are listed once, from our own table
                yield record(path, kind, hook, note if kind in _ON_CALLS else "")
    for hook in hooks_of(cell):
        for kind, callback in (("forward_pre", hook.before), ("forward", hook.after), ("replaced call", hook.instead)):
            if callback is not None:
                yield record(path, kind, callback, note)
    for hook in load_hooks_of(cell):
        yield record(path, "load", hook)
    for name, kind in _SINGLE.items():
        if vars(cell).get(name) is not None:
            yield record(path, kind, vars(cell)[name], note)
    for name, value in vars(cell).items():
        if name in ("construct", "__call__") or (is_ours(value) and callable(value)):
            for hook in callbacks_on(value):
                yield record(path, f"replaced {name}", hook, note)


def _of_parameter(name: str, parameter: mindspore.Parameter) -> Iterator[InstalledHook]:
    for tap in taps_on(parameter):
        yield record(name, "tensor", tap.fn)
    hook: Any = vars(parameter).get("__parameter_forward_hook__")
    if hook is not None:
        yield record(name, "parameter_forward", hook)
