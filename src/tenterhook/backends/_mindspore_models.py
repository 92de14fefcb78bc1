"""The cells of a MindSpore model under plain names, and what hooks on them cannot see."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mindspore
from mindspore import context, nn
from mindspore.common.recompute import _RecomputeCell, _WrapCell

from tenterhook.backends import ParameterEntry
from tenterhook.backends._mindspore_seams import OPTIMIZERS
from tenterhook.errors import UnsupportedError
from tenterhook.selection import Entry

__all__ = ["blind_spots", "check", "has_optimizer", "is_compiled", "list_cells", "list_parameters"]

_CONTAINERS = (nn.CellList, nn.CellDict)
_HIDDEN = (_RecomputeCell, _WrapCell, *OPTIMIZERS)
_GRAPH_MODE = (
    "MindSpore is in graph mode, where the model is compiled and calls no Python hooks\n"
    "  say mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first; weights and results stay the same"
)


def _wrapped(cell: nn.Cell) -> str | None:
    """Return the name of the attribute that holds the model in a cell that trains it."""
    if isinstance(cell, nn.TrainOneStepCell):
        return "network"
    return "_backbone" if isinstance(cell, nn.WithLossCell) else None


def _walk(model: nn.Cell) -> Iterator[tuple[str, str, nn.Cell, bool]]:
    """Yield (path, raw path, cell, is wrapper) in order of definition, shared cells once for each path."""
    ancestors: set[int] = set()

    def visit(cell: nn.Cell, path: str, raw: str) -> Iterator[tuple[str, str, nn.Cell, bool]]:
        if id(cell) in ancestors:
            return
        ancestors.add(id(cell))
        wrapped = _wrapped(cell)
        yield path, raw, cell, wrapped is not None
        for name, child in cell._cells.items():
            if child is None or isinstance(child, _HIDDEN) or (wrapped and name == "grad_reducer"):
                continue
            child_path = path if name == wrapped else f"{path}.{name}" if path else name
            yield from visit(child, child_path, f"{raw}.{name}" if raw else name)
        ancestors.discard(id(cell))

    return visit(model, "", "")


def list_cells(model: nn.Cell) -> list[Entry]:
    """List every cell once, under its first path."""
    first: dict[int, tuple[str, str, nn.Cell]] = {}
    aliases: dict[int, list[str]] = {}
    for path, raw, cell, is_wrapper in _walk(model):
        if is_wrapper:
            continue  # the model inside bears the name
        if id(cell) in first:
            aliases.setdefault(id(cell), []).append(path)
        else:
            first[id(cell)] = (path, raw, cell)
    return [
        Entry(
            path=path,
            module=cell,
            aliases=tuple(aliases.get(key, ())),
            raw_path=raw,
            type_names=tuple(cls.__name__ for cls in type(cell).__mro__ if cls is not object),
            callable=not isinstance(cell, _CONTAINERS),
        )
        for key, (path, raw, cell) in first.items()
    ]


def list_parameters(model: nn.Cell) -> list[ParameterEntry]:
    """List every parameter once, under its first name."""
    first: dict[int, tuple[str, str, mindspore.Parameter]] = {}
    aliases: dict[int, list[str]] = {}
    for path, _, cell, _ in _walk(model):
        for name, held in cell._params.items():
            if held is None:
                continue
            parameter = held if held.inited_param is None else held.inited_param
            full = f"{path}.{name}" if path else name
            if id(parameter) not in first:
                first[id(parameter)] = (full, path, parameter)
            elif full != first[id(parameter)][0]:
                aliases.setdefault(id(parameter), []).append(full)
    return [
        ParameterEntry(full, path, parameter, tuple(aliases.get(key, ())))
        for key, (full, path, parameter) in first.items()
    ]


def check(model: nn.Cell) -> None:
    """Refuse graph mode and cells that were loaded as graphs."""
    if context.get_context("mode") == context.GRAPH_MODE:
        raise UnsupportedError(_GRAPH_MODE)
    for path, _, cell, _ in _walk(model):
        if isinstance(cell, nn.GraphCell):
            where = f"cell '{path}'" if path else "this cell"
            raise UnsupportedError(
                f"{where} is a GraphCell, a compiled graph without Python inside\n"
                "  hook the model that the graph was exported from"
            )


def is_compiled(cell: nn.Cell) -> bool:
    """Whether the construct of a cell is decorated by ``ms.jit``."""
    return hasattr(type(cell).construct, "__wrapped_by_jit__") or (
        getattr(getattr(cell.construct, "__code__", None), "co_name", "") == "staging_specialize"
    )


def blind_spots(model: nn.Cell, *, compiled_runs_eager: bool) -> dict[str, str]:
    """Path -> reason, for cells that run without being called."""
    reasons: dict[str, str] = {}
    graph_mode = context.get_context("mode") == context.GRAPH_MODE
    compiled: list[str] = []
    for path, _, cell, _ in _walk(model):
        prefix = f"{path}." if path else ""
        if isinstance(cell, nn.MultiheadAttention):
            reasons[f"{prefix}out_proj"] = "weights used without calling the cell"
        if path and graph_mode:
            reasons[path] = "graph mode: compiled code calls no hooks"
        elif any(path.startswith(above) and path != above.rstrip(".") for above in compiled):
            reasons[path] = "inside a cell that ms.jit compiles: compiled code calls no hooks"
        if not compiled_runs_eager and is_compiled(cell):
            compiled.append(prefix)
    return reasons


def has_optimizer(model: nn.Cell) -> bool:
    """Look for a live optimizer that holds a parameter of ``model``; ask once, it goes through all objects."""
    parameters = {id(entry.parameter) for entry in list_parameters(model)}
    if not parameters:
        return False
    for candidate in gc.get_objects():
        # type() and not isinstance(): isinstance would run __class__ properties of foreign proxies
        if issubclass(type(candidate), OPTIMIZERS) and any(
            id(parameter) in parameters for parameter in getattr(candidate, "parameters", ())
        ):
            return True
    return False
