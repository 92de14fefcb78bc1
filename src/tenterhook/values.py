"""Nested values and the arguments of calls: walk them, replace parts of them, say how two differ; of no framework.

Parts are named by slots (see :mod:`tenterhook.address`): ``""`` the value itself, ``[0]`` in a list, tuple or deque,
``.name`` for fields of dataclasses, attrs classes, named tuples and namespaces, ``["key"]`` in mappings. A mapping
that is a dataclass as well (transformers' ``ModelOutput``) uses field names.

Walked are: tuple, list, deque and their subclasses, named tuples (also ``PackedSequence`` and ``torch.return_types``),
mappings, dataclasses, attrs classes, ``SimpleNamespace``, what :func:`register_node` was told of, and the public
attributes of plain objects: those with a ``__dict__`` whose class defines neither calls, attribute look-up nor
iteration (so never a module). A plain object within a plain object is left closed: such chains lead from an argument
to the whole program. Sets and iterators are left closed too: the first have no order, the others would be used up.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tenterhook._nodes import Parts, node_of, register_node
from tenterhook._placing import Placed, place
from tenterhook._slots import attribute_step, index_step, split_slot
from tenterhook.errors import SelectionError

__all__ = [
    "MAX_DEPTH",
    "IsLeaf",
    "ParameterNames",
    "argument_leaves",
    "bind_arguments",
    "describe_structure",
    "get_slot",
    "leaves",
    "no_tensor_in",
    "rebuild",
    "register_node",
    "replace_arguments",
    "same_structure",
]

MAX_DEPTH = 64
"""How many containers deep values are walked; what lies deeper is left alone."""

IsLeaf: TypeAlias = "type | tuple[type, ...] | Callable[[Any], bool]"
"""What counts as a leaf: types, which are fastest, or a predicate."""

_SHOWN_PARTS = 6
_SHOWN_DEPTH = 4


def leaves(value: Any, is_leaf: IsLeaf) -> list[tuple[str, Any]]:
    """List the leaves of a nested value with their slots, in the order of the value.

    What is neither leaf nor container (None, numbers, text) is not listed. A leaf that stands at two slots is listed
    twice; a container that holds itself is not entered again.

    Args:
        value: Any value.
        is_leaf: Types, or a predicate, that tell what a leaf is.
    """
    if isinstance(is_leaf, (tuple, type)):
        if isinstance(value, is_leaf):
            return [("", value)]
        if type(value) is tuple:
            found = [(index_step(index), part) for index, part in enumerate(value) if isinstance(part, is_leaf)]
            if len(found) == len(value):
                return found
        elif value is None:
            return []
    test = _as_predicate(is_leaf)
    if test(value):
        return [("", value)]
    found = []
    _collect(value, "", test, found, [])
    return found


def no_tensor_in(output: Any) -> str:
    """Say that `leaves` finds nothing in what a module gave: a number, or what does not show its parts, as a set or a generator."""
    return f"no tensor is seen in its output ({type(output).__name__})"


def _collect(
    value: Any, slot: str, test: Callable[[Any], bool], found: list[tuple[str, Any]], above: list[tuple[int, bool]]
) -> None:
    for step, part in _parts(value, above):
        if test(part):
            found.append((slot + step, part))
        elif part is not None:
            above.append((id(value), _is_plain(value)))
            _collect(part, slot + step, test, found, above)
            above.pop()


def _parts(value: Any, above: list[tuple[int, bool]]) -> Parts:
    """Return the parts of a value below the containers ``above``: their ids, and whether each is a plain object."""
    node = node_of(type(value))
    if node is None or len(above) >= MAX_DEPTH:
        return ()
    if above and (any(id(value) == container for container, _ in above) or (node.plain and any(p for _, p in above))):
        return ()
    return node.flatten(value)


def _is_plain(value: Any) -> bool:
    node = node_of(type(value))
    return node is not None and node.plain


def _as_predicate(is_leaf: IsLeaf) -> Callable[[Any], bool]:
    if isinstance(is_leaf, (tuple, type)):
        return lambda value: isinstance(value, is_leaf)
    return is_leaf


def get_slot(value: Any, slot: str) -> Any:
    """Return the part of a value at a slot.

    Raises:
        SelectionError: The slot is malformed, or the value has no such part; the message lists those that it has.
    """
    part, reached = value, ""
    for step in _steps(slot):
        node = node_of(type(part))
        inner = dict(node.flatten(part)) if node is not None else {}
        if step not in inner:
            raise _no_slot(value, slot, reached, list(inner))
        part = inner[step]
        reached += step
    return part


def _steps(slot: str) -> tuple[str, ...]:
    steps = split_slot(slot)
    if steps and steps[0][0] not in ".[":
        return (f".{steps[0]}", *steps[1:])
    return steps


def _no_slot(value: Any, slot: str, reached: str, inner: list[str]) -> SelectionError:
    where = f"at {reached!r}" if reached else "the value"
    has = f"has {', '.join(inner[:8])}{', ...' if len(inner) > 8 else ''}" if inner else "has no parts"
    return SelectionError(f"no slot {slot!r} in {describe_structure(value, ())}: {where} {has}")


def rebuild(value: Any, replacements: Mapping[str, Any], *, placed: list[Placed] | None = None) -> Any:
    """Return the value with the parts at some slots replaced; the value itself stays as it is.

    Types are kept, with what else the containers carry (default factories, attributes, fields that are not arguments).
    Containers along the way to a replaced part are new, all others are the same objects; where every replacement is
    the very object that is there already, the value itself is returned.

    Args:
        value: Any value.
        replacements: New part by slot; where one slot lies within another, the outer one wins.
        placed: Where it is given, containers that can be changed stay the same objects, and what has been put into them is added here.

    Raises:
        SelectionError: The value has no such slot.
        EditError: A container's class gives no way to make another one.
    """
    if not replacements:
        return value
    if "" in replacements:
        return replacements[""]
    tree: dict[str, Any] = {}
    for slot, new in replacements.items():
        _plant(tree, _steps(slot), new)
    return _rebuild(value, tree, value, "", placed)


class _Replacement:
    __slots__ = ("new",)

    def __init__(self, new: Any) -> None:
        self.new = new


def _plant(tree: dict[str, Any], steps: tuple[str, ...], new: Any) -> None:
    for step in steps[:-1]:
        tree = tree.setdefault(step, {})
        if isinstance(tree, _Replacement):
            return
    tree[steps[-1]] = _Replacement(new)


def _rebuild(value: Any, tree: dict[str, Any], whole: Any, reached: str, placed: list[Placed] | None) -> Any:
    node = node_of(type(value))
    inner = dict(node.flatten(value)) if node is not None else {}
    changed: dict[str, Any] = {}
    for step, below in tree.items():
        if step not in inner:
            raise _no_slot(whole, reached + step, reached, list(inner))
        old = inner[step]
        new = below.new if isinstance(below, _Replacement) else _rebuild(old, below, whole, reached + step, placed)
        if new is not old:
            changed[step] = new
    if not changed or node is None or (placed is not None and place(value, changed, placed)):
        return value
    return node.unflatten(value, changed)


def same_structure(a: Any, b: Any, is_leaf: IsLeaf) -> str | None:
    """Tell whether two values are built alike; None if so, else a phrase that names both structures.

    Alike are values of the same container types with the same slots and leaves at the same slots. Leaves are not
    compared with each other; what is neither leaf nor container is compared by type.

    >>> same_structure((1.0, None), 1.0, float)
    'tuple(float, None) against float'
    """
    test = _as_predicate(is_leaf)
    slot = next(_differences(a, b, "", test, ([], [])), None)
    if slot is None:
        return None
    where = f" (they part at {slot})" if slot else ""
    return f"{describe_structure(a, is_leaf)} against {describe_structure(b, is_leaf)}{where}"


def _differences(
    a: Any, b: Any, slot: str, test: Callable[[Any], bool], above: tuple[list[tuple[int, bool]], list[tuple[int, bool]]]
) -> Iterator[str]:
    leaf = test(a)
    if bool(leaf) is not bool(test(b)) or (not leaf and type(a) is not type(b)):
        yield slot
        return
    if leaf or a is b:
        return
    parts, others = _parts(a, above[0]), dict(_parts(b, above[1]))
    if [step for step, _ in parts] != list(others):
        yield slot
        return
    above[0].append((id(a), _is_plain(a)))
    above[1].append((id(b), _is_plain(b)))
    for step, part in parts:
        yield from _differences(part, others[step], slot + step, test, above)
    above[0].pop()
    above[1].pop()


def describe_structure(value: Any, is_leaf: IsLeaf) -> str:
    """Describe how a value is built, in one short line: ``tuple(Tensor, dict(mask=Tensor, scale=None))``."""
    return _describe(value, _as_predicate(is_leaf), [])


def _describe(value: Any, test: Callable[[Any], bool], above: list[tuple[int, bool]]) -> str:
    name = "None" if value is None else type(value).__name__
    node = node_of(type(value))
    if test(value) or node is None:
        return name
    parts = _parts(value, above)
    if not parts:
        return f"{name}()" if not above else f"{name}(...)" if node.flatten(value) else f"{name}()"
    if len(above) >= _SHOWN_DEPTH:
        return f"{name}(...)"
    above.append((id(value), _is_plain(value)))
    label = _key_label if isinstance(value, Mapping) else _label
    shown = [label(step) + _describe(part, test, above) for step, part in parts[: _SHOWN_PARTS + 1]]
    if len(parts) > 2 and parts[0][0] == "[0]" and label is _label:
        every = {_describe(part, test, above) for _, part in parts}
        if len(every) == 1:
            shown = [f"{len(parts)} x {every.pop()}"]
    above.pop()
    if len(shown) > _SHOWN_PARTS:
        shown = [*shown[:_SHOWN_PARTS], f"... {len(parts)} in all"]
    return f"{name}({', '.join(shown)})"


def _label(step: str) -> str:
    return f"{step[1:]}=" if step[0] == "." else ""


def _key_label(step: str) -> str:
    return f"{step[1:]}=" if step[0] == "." else step[1:-1].strip('"') + "="


_of_methods: weakref.WeakKeyDictionary[types.CodeType, ParameterNames] = weakref.WeakKeyDictionary()


class ParameterNames:
    """The names of a function's parameters, worked out once so that binding a call is cheap.

    Attributes:
        positional: Names of the parameters that a positional argument can be bound to, in order.
        var_positional: Name of ``*args``, which positional arguments without a parameter of their own go by.
    """

    __slots__ = ("count", "positional", "positional_only", "var_keyword", "var_positional")

    def __init__(self, signature: inspect.Signature | None) -> None:
        parameters = list(signature.parameters.values()) if signature is not None else []
        named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.positional = tuple(p.name for p in named)
        self.count = len(named)
        self.positional_only = frozenset(p.name for p in named if p.kind is p.POSITIONAL_ONLY)
        self.var_positional = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        self.var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "kwargs")

    @classmethod
    def of(cls, function: Any) -> ParameterNames:
        """Return the names for a callable; for one that shows no signature, arguments go by ``args[0]``."""
        written = getattr(function, "__func__", None)
        if type(function) is not types.MethodType or type(written) is not types.FunctionType or written.__dict__:
            return cls._look_up(function)
        known = _of_methods.get(written.__code__)  # those of the modules of one class are the same
        if known is None:
            known = _of_methods[written.__code__] = cls._look_up(function)
        return known

    @classmethod
    def _look_up(cls, function: Any) -> ParameterNames:
        try:
            return cls(inspect.signature(function))
        except (TypeError, ValueError):  # not every callable of C has a signature, which is no fault of the call
            return cls(None)

    def name(self, index: int) -> str:
        """Return what the positional argument at an index is called: ``x``, or ``args[0]``."""
        return self.positional[index] if index < self.count else f"{self.var_positional}[{index - self.count}]"

    def keyword(self, key: str) -> str:
        """Return what a keyword argument is called: its key, or ``kwargs["x"]`` where ``x`` is positional-only."""
        if key in self.positional_only:
            return f'{self.var_keyword}["{key}"]'
        step = attribute_step(key)
        return step[1:] if step[0] == "." else f"{self.var_keyword}{step}"


def bind_arguments(
    signature: inspect.Signature | ParameterNames | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name: positional ones first, then keywords in the order given.

    Arguments that are left out are not listed. Positional arguments without a parameter of their own are called
    ``args[0]``, ``args[1]`` (``inputs[0]`` if the function says ``*inputs``); the names are slots of kind ``input``.
    Never raises: a call that does not fit the signature fails by itself, and its arguments are listed all the same, an
    argument given twice under both ``x`` and ``kwargs["x"]``.

    Args:
        signature: Of the function without ``self``; a :class:`ParameterNames` is fastest; None if it is not known.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    names = signature if isinstance(signature, ParameterNames) else ParameterNames(signature)
    if len(args) <= names.count:
        bound = dict(zip(names.positional, args, strict=False))
        if not kwargs:
            return bound
    else:
        bound = {names.name(index): value for index, value in enumerate(args)}
    for key, value in kwargs.items():
        bound[_keyword_name(names, key, bound)] = value
    return bound


def _keyword_name(names: ParameterNames, key: str, bound: Mapping[str, Any]) -> str:
    name = names.keyword(key)
    return f'{names.var_keyword}["{key}"]' if name in bound else name


def argument_leaves(bound: Mapping[str, Any], is_leaf: IsLeaf) -> list[tuple[str, Any]]:
    """List the leaves among bound arguments with their slots: ``x``, ``mask[0]``, ``args[1]["key"]``."""
    return [(name + slot, leaf) for name, value in bound.items() for slot, leaf in leaves(value, is_leaf)]


def replace_arguments(
    signature: inspect.Signature | ParameterNames | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    replacements: Mapping[str, Any],
    *,
    placed: list[Placed] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs with the parts at some slots replaced; each argument stays where the caller put it.

    Raises:
        SelectionError: The call has no such argument, or the argument no such part; the message lists what it has.
    """
    names = signature if isinstance(signature, ParameterNames) else ParameterNames(signature)
    bound = bind_arguments(names, args, kwargs)
    by_name: dict[str, dict[str, Any]] = {}
    for written, new in replacements.items():
        slot = written.removeprefix(".")  # as addresses write it
        name = _argument_of(slot, bound)
        by_name.setdefault(name, {})[slot[len(name) :]] = new
    values = [
        rebuild(value, by_name[name], placed=placed) if name in by_name else value for name, value in bound.items()
    ]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _argument_of(slot: str, bound: Mapping[str, Any]) -> str:
    name = ""
    for step in split_slot(slot):
        name += step
        if name in bound:
            return name
    raise SelectionError(f"no argument {slot!r} in this call, which has {', '.join(bound) or 'none'}")
