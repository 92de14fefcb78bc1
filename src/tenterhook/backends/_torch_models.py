"""The modules of a torch model under plain names, and what hooks on them cannot see."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from tenterhook.backends import ParameterEntry
from tenterhook.backends import _places as places
from tenterhook.backends._live_objects import instances_of
from tenterhook.backends._torch_shards import sharded_parameters
from tenterhook.errors import UnsupportedError
from tenterhook.selection import Entry

__all__ = [
    "blind_spots",
    "check",
    "fused",
    "has_optimizer",
    "is_exported",
    "is_wrapper",
    "list_modules",
    "list_parameters",
    "running_modules",
    "walk",
]


# Torch's own, whatever somebody puts in their place meanwhile: these frames are inside those of theirs.
_INNER, _OUTER = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_WRAPPED_ATTRIBUTES = {  # class name -> attribute that holds the wrapped module; by name, so that nothing is imported for it
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
}


def _wrapped_attribute(module: nn.Module) -> str | None:
    if not type(module).__module__.startswith("torch."):
        return None
    return _WRAPPED_ATTRIBUTES.get(type(module).__name__)


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module inside bears the name of this one: ``DistributedDataParallel``, ``torch.compile``'s and the like."""
    return _wrapped_attribute(module) is not None


def is_exported(value: object) -> bool:
    return type(value).__name__ == "ExportedProgram" and type(value).__module__.startswith("torch.export")


def walk(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """Yield (path, raw path, module, is wrapper) for every path of every module, the root first, depth first."""
    return places.walk(model, _children, _wrapped_attribute)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _type_names(module: nn.Module) -> tuple[str, ...]:
    # a lazy module goes by the class that its first call makes of it
    becomes = getattr(module, "cls_to_become", None) if isinstance(module, LazyModuleMixin) else None
    classes = [*(becomes.__mro__ if becomes is not None else ()), *type(module).__mro__]
    if len(classes) > 2 and classes[1].__name__ == "FSDPModule":  # made by fully_shard, of the class that comes next
        classes.insert(0, classes[2])
    return tuple(dict.fromkeys(cls.__name__ for cls in classes if cls is not object))


def list_modules(model: nn.Module) -> list[Entry]:
    return places.list_modules(
        walk(model),
        _type_names,
        lambda module: not (isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward),
    )


def list_parameters(model: nn.Module) -> list[ParameterEntry]:
    shards = sharded_parameters(model)
    return places.list_parameters(
        walk(model),
        lambda module: [
            (name, shards.get(id(one), one)) for name, one in module._parameters.items() if one is not None
        ],
    )


class _Parameters:
    """The modules and parameters that a model had, by names and weak references; whoever has this keeps none of them."""

    __slots__ = ("names", "parts")

    def __init__(self, names: list[object], parts: list[object]) -> None:
        self.names = names
        self.parts = [part if part is None else weakref.ref(part) for part in parts]

    def fits(self, names: list[object], parts: list[object]) -> bool:
        return names == self.names and all(
            part is (known if known is None else known()) for part, known in zip(parts, self.parts, strict=True)
        )


def same_parameters(model: nn.Module, before: object) -> object:
    names: list[object] = []
    parts: list[object] = [model]
    seen: set[int] = set()
    for module in parts:  # which grows meanwhile
        if not isinstance(module, nn.Module) or id(module) in seen:
            continue
        if hasattr(type(module), "_get_fsdp_state"):
            return None  # which puts other parameters there and back
        seen.add(id(module))
        names += (*module._modules, None, *module._parameters, None)
        parts += (*module._modules.values(), *module._parameters.values())
    if isinstance(before, _Parameters) and before.fits(names, parts):
        return before
    return _Parameters(names, parts)


def check(model: nn.Module) -> None:
    """Refuse models that accept no hooks, or accept them and never call them."""
    for path, _, module, _ in walk(model):
        if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            where = f"module '{path}'" if path else "this model"
            raise UnsupportedError(
                f"{where} is a script module ({type(module).__name__}): TorchScript runs no Python hooks inside it\n"
                "  hook the model that it was made from, before torch.jit.script or torch.jit.trace"
            )


def blind_spots(model: nn.Module) -> dict[str, str]:
    """Path -> reason, for modules that run without being called."""
    reasons: dict[str, str] = {}
    for path, _, module, _ in walk(model):
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            reasons[f"{prefix}out_proj"] = "weights used without calling the module"
        elif isinstance(module, torch.fx.GraphModule):
            reasons.update(_inlined(module, prefix))
        elif "__overloads__" in vars(module):  # what torch.jit.script leaves on a module that it has read
            reasons[path] = (
                "never called: it was made into a script, which runs no hooks (scripted[0] gives this original)"
            )
        elif type(module).__name__ == "LinearPackedParams":
            reasons[path] = "weights used without calling the module: it holds those of a quantised one"
    return reasons


def _inlined(module: torch.fx.GraphModule, prefix: str) -> dict[str, str]:
    """Which modules a graph was traced through, so that it does not call them."""
    called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    above = {ancestor for name in called for ancestor in _ancestors(name)}
    reasons: dict[str, str] = {}
    for name, _ in module.named_modules():
        if not name or name in called or not called.isdisjoint(_ancestors(name)):
            continue
        reasons[prefix + name] = (
            "inlined by fx: the graph calls modules inside it, not itself"
            if name in above
            else "inlined by fx: the graph does not call it"
        )
    return reasons


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def fused(model: nn.Module) -> set[str]:
    """Paths of the modules on which a hook keeps torch from the fused transformer path; none where that is off anyway."""
    if not torch.backends.mha.get_fastpath_enabled():
        return set()
    paths = [(path, module) for path, _, module, _ in walk(model)]
    layers = {path for path, module in paths if isinstance(module, nn.TransformerEncoderLayer)}
    return {path for path, _ in paths if path in layers or "" in layers or not layers.isdisjoint(_ancestors(path))}


def running_modules() -> list[nn.Module]:
    found = []
    frame = sys._getframe(1)
    open_call = None  # whose outer frame is still to come
    while frame is not None:
        if frame.f_code is _INNER:
            open_call = frame.f_locals["self"]
            found.append(open_call)
        elif frame.f_code is _OUTER:  # a call may begin, for us, where torch's inner frame is not there yet
            if frame.f_locals["self"] is not open_call:
                found.append(frame.f_locals["self"])
            open_call = None
        frame = frame.f_back
    return found


def has_optimizer(model: nn.Module) -> bool:
    """Look for a live optimizer that holds a parameter of ``model``; takes some 20 ms, so ask once."""
    parameters = {id(parameter) for parameter in model.parameters()}
    if not parameters:
        return False
    return any(
        id(parameter) in parameters
        for optimizer in instances_of(torch.optim.Optimizer)
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    )
