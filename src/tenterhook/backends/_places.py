"""The modules and parameters of a model, each once, under the first path that leads to it; the same for every framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tenterhook.backends._types import ParameterEntry
from tenterhook.selection import Entry

__all__ = ["Place", "list_modules", "list_parameters", "walk"]

Place = tuple[str, str, Any, bool]
"""(path, raw path, module, is wrapper): of a wrapper, the module inside bears its name."""

ModuleT = TypeVar("ModuleT")
_MOST_ALIASES = 16  # of one module; nested sharing has exponentially many paths


def walk(
    model: ModuleT,
    children: Callable[[ModuleT], Iterable[tuple[str, ModuleT]]],
    wrapped_attribute: Callable[[ModuleT], str | None] = lambda module: None,
) -> Iterator[tuple[str, str, ModuleT, bool]]:
    """Yield every path of every module, the root first, depth first, in order of definition.

    Args:
        model: the root.
        children: gives the modules inside a module, with their names.
        wrapped_attribute: gives the name of the attribute in which a wrapper holds the module that it wraps.
    """
    paths_of: dict[int, int] = {}
    ancestors: set[int] = set()

    def visit(module: ModuleT, path: str, raw: str) -> Iterator[tuple[str, str, ModuleT, bool]]:
        key = id(module)
        if key in ancestors or paths_of.get(key, 0) >= _MOST_ALIASES:
            return
        paths_of[key] = paths_of.get(key, 0) + 1
        ancestors.add(key)
        wrapped = wrapped_attribute(module)
        yield path, raw, module, wrapped is not None
        for name, child in children(module):
            child_path = path if name == wrapped else f"{path}.{name}" if path else name
            yield from visit(child, child_path, f"{raw}.{name}" if raw else name)
        ancestors.discard(key)

    return visit(model, "", "")


def list_modules(
    places: Iterable[Place],
    type_names: Callable[[Any], tuple[str, ...]] | None = None,
    is_called: Callable[[Any], bool] = lambda module: True,
) -> list[Entry]:
    """List every module but the wrappers once, its other paths as aliases.

    Args:
        places: what :func:`walk` yields.
        type_names: gives the names that a module's class goes by; by default those of its bases.
        is_called: whether a module is more than a container that only holds others.
    """
    first: dict[int, Place] = {}
    aliases: dict[int, list[str]] = {}
    for place in places:
        path, _, module, is_wrapper = place
        if is_wrapper:
            continue
        if id(module) in first:
            aliases.setdefault(id(module), []).append(path)
        else:
            first[id(module)] = place
    return [
        Entry(
            path=path,
            module=module,
            aliases=tuple(aliases.get(key, ())),
            raw_path=raw,
            type_names=tuple(cls.__name__ for cls in type(module).__mro__ if cls is not object)
            if type_names is None
            else type_names(module),
            callable=is_called(module),
        )
        for key, (path, raw, module, _) in first.items()
    ]


def list_parameters(places: Iterable[Place], own: Callable[[Any], Iterable[tuple[str, Any]]]) -> list[ParameterEntry]:
    """List every parameter once, its other names as aliases.

    Args:
        places: what :func:`walk` yields.
        own: gives a module's own parameters, with their names in it.
    """
    first: dict[int, tuple[str, str, Any]] = {}
    aliases: dict[int, list[str]] = {}
    for path, _, module, _ in places:
        for name, parameter in own(module):
            full = f"{path}.{name}" if path else name
            if id(parameter) not in first:
                first[id(parameter)] = (full, path, parameter)
            elif full != first[id(parameter)][0]:
                aliases.setdefault(id(parameter), []).append(full)
    return [
        ParameterEntry(full, path, parameter, tuple(aliases.get(key, ())))
        for key, (full, path, parameter) in first.items()
    ]
