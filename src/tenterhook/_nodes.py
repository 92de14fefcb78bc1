"""How each type of nested value is taken apart into its parts and put together again."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

from tenterhook._slots import attribute_step, index_step, key_step
from tenterhook.errors import EditError

__all__ = ["Node", "node_of", "register_node"]

Parts = Sequence[tuple[str, Any]]


class Node(NamedTuple):
    """How one type is taken apart and put together.

    Attributes:
        flatten: Gives the parts of a value, each with its step of a slot.
        unflatten: Gives a value like the first argument with the new parts in the second (step -> part); must not
            change its first argument.
        plain: Whether this is an object of no known kind, of which only the attributes are looked at.
    """

    flatten: Callable[[Any], Parts]
    unflatten: Callable[[Any, dict[str, Any]], Any]
    plain: bool = False


_ATOMS = (
    str, bytes, bytearray, memoryview, range, int, float, complex, type(None), type, enum.Enum, BaseException,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip
# A class that defines one of these means more than a bag of attributes (a module, a proxy, an iterator, a config).
_SPECIAL = ("__call__", "__getattr__", "__getattribute__", "__iter__", "__next__", "__array__", "__enter__", "__get__")

_registered: dict[type, Node] = {}
# Weak, so that looking at a value does not keep its class alive.
_known: weakref.WeakKeyDictionary[type, Node | None] = weakref.WeakKeyDictionary()


def register_node(
    cls: type,
    flatten: Callable[[Any], Iterable[tuple[str, Any]]],
    unflatten: Callable[[Any, dict[str, Any]], Any],
) -> Callable[[], None]:
    """Say how values of a type, and of its subclasses, are walked; wins over every built-in rule.

    Args:
        cls: The type.
        flatten: Takes a value, gives ``(step, part)`` pairs; a step is one step of a slot: ``[0]``, ``.name``,
            ``["key"]``.
        unflatten: Takes a value and the new parts by step, gives a new value; the value given must stay as it is.

    Returns:
        A function that takes the registration back.
    """
    node = Node(lambda value: list(flatten(value)), unflatten)
    previous = _registered.get(cls)
    _registered[cls] = node
    _known.clear()

    def unregister() -> None:
        if _registered.get(cls) is not node:
            return
        del _registered[cls]
        if previous is not None:
            _registered[cls] = previous
        _known.clear()

    return unregister


def node_of(cls: type) -> Node | None:
    """Return how values of this type are walked, None where they have no parts."""
    try:
        return _known[cls]
    except KeyError:
        node = _known[cls] = _find_node(cls)
        return node


def _find_node(cls: type) -> Node | None:
    for base in cls.__mro__:
        if base in _registered:
            return _registered[base]
    if issubclass(cls, _ATOMS):
        return None
    if issubclass(cls, tuple):
        return _tuple_node(cls)
    if issubclass(cls, (list, deque, MutableSequence)):
        return Node(_flatten_sequence, _unflatten_list if cls is list else _unflatten_mutable)
    if issubclass(cls, Mapping):
        if dataclasses.is_dataclass(cls):
            return Node(_flatten_record, _unflatten_record)
        return Node(_flatten_mapping, _unflatten_mapping)
    names = _field_names(cls)
    if names is not None:
        return Node(lambda value: _flatten_fields(value, names), _unflatten_attributes)
    if issubclass(cls, types.SimpleNamespace):
        return Node(_flatten_namespace, _unflatten_attributes)
    if _is_plain(cls):
        return Node(_flatten_namespace, _unflatten_attributes, plain=True)
    return None


def _is_plain(cls: type) -> bool:
    """Tell whether a class is no more than a bag of attributes, such as DETR's ``NestedTensor``."""
    if cls.__dictoffset__ == 0 or cls.__module__ == "builtins":
        return False
    return not any(name in base.__dict__ for base in cls.__mro__[:-1] for name in _SPECIAL)


def _tuple_node(cls: type) -> Node:
    names = getattr(cls, "_fields", None)
    if names is None and hasattr(cls, "n_sequence_fields"):
        # What C code returns as a named tuple (torch.return_types.max): its names are its match arguments.
        names = getattr(cls, "__match_args__", None)
    if isinstance(names, tuple) and all(isinstance(name, str) for name in names):
        steps = [attribute_step(name) for name in names]
        return Node(lambda value: list(zip(steps, value, strict=False)), _unflatten_tuple)
    return Node(_flatten_sequence, _unflatten_tuple)


def _field_names(cls: type) -> list[str] | None:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    attributes = getattr(cls, "__attrs_attrs__", None)  # attrs' own mark, so attrs need not be imported
    return None if attributes is None else [attribute.name for attribute in attributes]


def _flatten_sequence(value: Sequence[Any]) -> Parts:
    return [(index_step(index), part) for index, part in enumerate(value)]


def _flatten_mapping(value: Mapping[Any, Any]) -> Parts:
    return [(key_step(key, position), value[key]) for position, key in enumerate(value)]


def _flatten_fields(value: Any, names: Iterable[str]) -> Parts:
    # A field with init=False may not have been set yet.
    return [(attribute_step(name), getattr(value, name)) for name in names if hasattr(value, name)]


def _flatten_record(value: Any) -> Parts:
    """Flatten a mapping that is a dataclass as well (transformers' ModelOutput): fields by name, other keys by key."""
    names = [field.name for field in dataclasses.fields(value)]
    parts = [(attribute_step(name), getattr(value, name)) for name in names if hasattr(value, name)]
    known = set(names)
    return parts + [(key_step(key, at), value[key]) for at, key in enumerate(value) if key not in known]


def _flatten_namespace(value: Any) -> Parts:
    return [(attribute_step(name), part) for name, part in vars(value).items() if not name.startswith("_")]


def _unflatten_list(value: list[Any], new: dict[str, Any]) -> list[Any]:
    """Return the list with new parts."""
    return [new.get(step, part) for step, part in _flatten_sequence(value)]


def _unflatten_tuple(value: Any, new: dict[str, Any]) -> Any:
    cls = type(value)
    node = node_of(cls)
    assert node is not None
    parts = [new.get(step, part) for step, part in node.flatten(value)]
    if cls is tuple:
        return tuple(parts)
    if hasattr(cls, "n_sequence_fields"):
        return cls(parts)
    # Past the class's own __new__: it may take its fields one by one, or check and convert them (PackedSequence).
    made = tuple.__new__(cls, parts)
    if hasattr(value, "__dict__"):
        made.__dict__.update(value.__dict__)
    return made


def _unflatten_mutable(value: Any, new: dict[str, Any]) -> Any:
    made = copy.copy(value)
    for index, (step, _) in enumerate(_flatten_sequence(value)):
        if step in new:
            made[index] = new[step]
    return made


def _unflatten_mapping(value: Any, new: dict[str, Any]) -> Any:
    changed = {key: new[step] for at, key in enumerate(value) if (step := key_step(key, at)) in new}
    if not isinstance(value, MutableMapping):
        return _remake(value, {**value, **changed})
    made = copy.copy(value)
    for key, part in changed.items():
        made[key] = part
    return made


def _remake(value: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except TypeError as error:
        raise EditError(
            f"cannot make a {type(value).__name__} with a changed value: its class takes no dict ({error}); "
            f"say how with tenterhook.values.register_node"
        ) from error


def _unflatten_record(value: Any, new: dict[str, Any]) -> Any:
    made = copy.copy(value)
    names = {attribute_step(field.name): field.name for field in dataclasses.fields(value)}
    for at, key in enumerate(value):
        step = attribute_step(key) if key in names.values() else key_step(key, at)
        if step in new:
            made[key] = new[step]
    for step, name in names.items():
        if step in new:
            object.__setattr__(made, name, new[step])  # also where the class does not keep key and field in step
    return made


def _unflatten_attributes(value: Any, new: dict[str, Any]) -> Any:
    made = _clone(value)
    node = node_of(type(value))
    assert node is not None
    for step, _ in node.flatten(value):
        if step in new:
            name = step[1:] if step[0] == "." else _name_of_step(value, step)
            object.__setattr__(made, name, new[step])
    return made


def _name_of_step(value: Any, step: str) -> str:
    return next(name for name in vars(value) if attribute_step(name) == step)


def _clone(value: Any) -> Any:
    """Copy an object without running its ``__init__`` or ``__setattr__``, so that frozen classes work too."""
    cls = type(value)
    try:
        made = object.__new__(cls)
    except TypeError:  # the layout of a built-in or C type: only its own protocol can copy it
        return copy.copy(value)
    if hasattr(value, "__dict__"):
        made.__dict__.update(value.__dict__)
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                object.__setattr__(made, name, getattr(value, name))
    return made
