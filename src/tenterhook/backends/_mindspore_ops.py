"""Functional calls of MindSpore, seen through its dispatch mode, which is on only while a followed model runs.

The mode is marked experimental by MindSpore, and runs below differentiation: what an operation gives there is not the
tensor that the user gets, and has no gradient. But differentiation makes a node of each operation, and once the model has
given its output the nodes can be reached from there: they are known by their names and by what goes into them, and hooks
on them see the gradients. The mode misses some operations (see ``MISSES``), and where one fails inside it, the process may
abort as it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import mindspore
from mindspore.utils.ms_dispatch import MsDispatchMode

from tenterhook.backends import OpListener
from tenterhook.backends._mindspore_seams import executor
from tenterhook.backends._user_code import folder_of, line_of_user
from tenterhook.values import leaves

__all__ = ["MISSES", "OpMode", "is_builtin_construct"]

MISSES = (
    "functional calls are those that MindSpore's dispatch mode (experimental) shows: kernels by their own names, a compound "
    "function as its parts, no indexing, and without pynative_synchronize no cat, zeros and ones; gradients of those that "
    "lead to the model's output"
)

_MINDSPORE = folder_of(mindspore)
_line_of_user = partial(line_of_user, _MINDSPORE)
_ENDINGS = re.compile(r"(?<!^)(Ext|View|Scalar|Tensor)+$")
_INTERNAL = frozenset({"typeof", "make_range", "shape", "rank"})
_LEAF = 2**64 - 1  # the number of the nodes of parameters and of what is differentiated for
_TYPES = (mindspore.Tensor,)

_Key = tuple[str, frozenset[tuple[int | str, int]]]
"""What a node is known by: its name, and which outputs of which other nodes go into it."""


class _Op(NamedTuple):
    """An operation whose node has not been found yet."""

    begun: Any
    slots: list[tuple[int, str]]  # of its outputs: (number, slot)


class OpMode(MsDispatchMode):
    """Tells a listener of the operations of one thread."""

    def __init__(self, listener: OpListener) -> None:
        super().__init__()
        self._listener = listener
        self._ops: dict[_Key, list[_Op]] = {}

    def __ms_dispatch__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation and tell of it."""
        kind = _kind(func, args)
        name = _plain(kind)
        begun = None if name in _INTERNAL else self._listener.begins(name, _line_of_user)
        if begun is None:
            return func(*args)
        inputs = [
            (tensor._grad_node, tensor._output_index) for _, tensor in leaves(args, _TYPES) if tensor._requires_grad
        ]
        try:
            result = func(*args)
        except BaseException as error:
            self._listener.ends(begun, None, error)
            raise
        self._listener.ends(begun, _values(result), None)
        if inputs and executor.enable_grad():
            slots = [(number, slot) for number, (slot, _) in enumerate(leaves(result, _TYPES))]
            self._ops.setdefault((kind, _sources(inputs)), []).append(_Op(begun, slots))
        return result

    def gives(self, value: Any) -> None:
        """Find the nodes of the operations that have led to a value, and tell of them."""
        if not self._ops:
            return
        nodes: dict[_Key, list[Any]] = {}
        for node in _nodes_behind(tensor._grad_node for _, tensor in leaves(value, _TYPES) if tensor._requires_grad):
            nodes.setdefault((node.name(), _sources(node.next_functions)), []).append(node)
        for key, ops in self._ops.items():
            found = sorted(nodes.get(key, ()), key=lambda node: node._sequence_nr())
            if len(found) == len(ops):  # else some of several that are alike lead nowhere, and which ones is not known
                for node, op in zip(found, ops, strict=True):
                    for number, slot in op.slots:
                        self._listener.differentiated(op.begun, slot, partial(_put_on, node, number))
        self._ops = {}


def _put_on(node: Any, number: int, fn: Callable[[Any], None]) -> None:
    """Call ``fn(gradient)`` when that of a node's output is known: after all hooks on tensors, which only this node has made."""

    def arrived(gradients: tuple[Any, ...]) -> None:
        if gradients[number] is not None:
            fn(gradients[number])

    node.register_prehook(arrived)


def _nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes and all that they come from, without leaves."""
    seen: set[int] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node._sequence_nr() == _LEAF or node._unique_id() in seen:
            continue
        seen.add(node._unique_id())
        yield node
        waiting += (source for source, _ in node.next_functions)


def _sources(nodes: Iterable[tuple[Any, int]]) -> frozenset[tuple[int | str, int]]:
    return frozenset(
        (node.name() if node._sequence_nr() == _LEAF else node._sequence_nr(), index)
        for node, index in nodes
        if node is not None
    )


def _kind(func: Any, args: tuple[Any, ...]) -> str:
    # older operations come as (primitive, name, real arguments)
    if len(args) > 1 and isinstance(args[0], mindspore.ops.Primitive) and type(args[1]) is str:
        return args[1]
    return func.name


def _plain(kind: str) -> str:
    """Write the name of a kernel as functions are named: ``AddExt`` as ``add``, and ``Muls``, that of ``x * 2``, as ``mul``."""
    return _ENDINGS.sub("", "Mul" if kind == "Muls" else kind).lower()


def _values(result: Any) -> Any:
    """Take a result out of differentiation, which has yet to be told of it; the memory is shared."""
    if isinstance(result, mindspore.Tensor):
        return mindspore.Tensor(result.asnumpy())
    if isinstance(result, (tuple, list)):
        return type(result)([_values(part) for part in result])
    return result


def is_builtin_construct(cell: mindspore.nn.Cell) -> bool:
    """Whether MindSpore wrote the cell's construct."""
    construct: Any = type(cell).construct
    while hasattr(construct, "__wrapped__"):
        construct = construct.__wrapped__
    code = getattr(construct, "__code__", None)
    return code is not None and code.co_filename.startswith(_MINDSPORE)
