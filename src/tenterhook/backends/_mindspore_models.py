"""The cells of a MindSpore model under plain names, and what hooks on them cannot see."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore
from mindspore import context, nn
from mindspore.common.recompute import _RecomputeCell, _WrapCell

from tenterhook.backends import ParameterEntry
from tenterhook.backends import _places as places
from tenterhook.backends._live_objects import instances_of
from tenterhook.backends._mindspore_seams import OPTIMIZERS
from tenterhook.errors import UnsupportedError
from tenterhook.selection import Entry

__all__ = [
    "blind_spots",
    "check",
    "has_optimizer",
    "is_compiled",
    "list_cells",
    "list_parameters",
    "optimizers_of",
    "walk",
]

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


def walk(model: nn.Cell) -> Iterator[tuple[str, str, nn.Cell, bool]]:
    """Yield (path, raw path, cell, is wrapper) for every path of every cell, the root first, depth first."""
    return places.walk(model, _children, _wrapped)


def _children(cell: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    wrapped = _wrapped(cell)
    for name, child in cell._cells.items():
        if child is not None and not isinstance(child, _HIDDEN) and not (wrapped and name == "grad_reducer"):
            yield name, child


def list_cells(model: nn.Cell) -> list[Entry]:
    """List every cell once, under its first path."""
    return places.list_modules(walk(model), is_called=lambda cell: not isinstance(cell, _CONTAINERS))


def list_parameters(model: nn.Cell) -> list[ParameterEntry]:
    """List every parameter once, under its first name."""
    return places.list_parameters(walk(model), _own_parameters)


def _own_parameters(cell: nn.Cell) -> Iterator[tuple[str, mindspore.Parameter]]:
    for name, held in cell._params.items():
        if held is not None:
            yield name, held if held.inited_param is None else held.inited_param


def check(model: nn.Cell) -> None:
    """Refuse graph mode and cells that were loaded as graphs."""
    if context.get_context("mode") == context.GRAPH_MODE:
        raise UnsupportedError(_GRAPH_MODE)
    for path, _, cell, _ in walk(model):
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
    for path, _, cell, _ in walk(model):
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


def optimizers_of(model: nn.Cell) -> Iterator[nn.Cell]:
    """Find the live optimizers that hold a parameter of ``model``; ask rarely, it goes through all objects."""
    parameters = {id(entry.parameter) for entry in list_parameters(model)}
    if not parameters:
        return
    for candidate in instances_of(*OPTIMIZERS):
        if any(id(parameter) in parameters for parameter in getattr(candidate, "parameters", ())):
            yield candidate


def has_optimizer(model: nn.Cell) -> bool:
    """Whether some live optimizer holds a parameter of ``model``."""
    return next(optimizers_of(model), None) is not None
