"""The arguments of a call, bound to names and replaced where the caller put them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tenterhook.errors import SelectionError
from tenterhook.values import (
    ParameterNames,
    argument_leaves,
    bind_arguments,
    replace_arguments,
)


class T:
    """A leaf."""


a, b, new = T(), T(), T()


def plain(x: Any, mask: Any = None, *, scale: Any = 1) -> None: ...
def variadic(x: Any, *inputs: Any, **options: Any) -> None: ...
def only(x: Any, /, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (plain, (1, 2), {}, {"x": 1, "mask": 2}),
        (plain, (1,), {"scale": 3, "mask": 2}, {"x": 1, "scale": 3, "mask": 2}),
        (variadic, (1, 2, 3), {"n": 4}, {"x": 1, "inputs[0]": 2, "inputs[1]": 3, "n": 4}),
        (only, (1,), {"x": 2, "a b": 3}, {"x": 1, 'options["x"]': 2, 'options["a b"]': 3}),
        (plain, (1, 2, 3), {"x": 4}, {"x": 1, "mask": 2, "args[0]": 3, 'kwargs["x"]': 4}),
        (None, (1, 2), {"k": 3}, {"args[0]": 1, "args[1]": 2, "k": 3}),
        (plain, (), {}, {}),
    ],
)
def test_arguments_are_bound_to_names(function: Any, args: Any, kwargs: Any, expected: dict[str, int]) -> None:
    signature = None if function is None else inspect.signature(function)
    for names in (signature, ParameterNames(signature)):
        bound = bind_arguments(names, args, kwargs)
        assert list(bound.items()) == list(expected.items())
        replaced = replace_arguments(names, args, kwargs, {slot: -value for slot, value in expected.items()})
        assert replaced == (tuple(-value for value in args), {key: -value for key, value in kwargs.items()})


def test_leaves_among_arguments_are_replaced_where_the_caller_put_them() -> None:
    args, kwargs = ((a, [b]), b), {"settings": {"k": a}, "flag": True}
    names = ParameterNames.of(variadic)
    found = argument_leaves(bind_arguments(names, args, kwargs), T)
    assert found == [("x[0]", a), ("x[1][0]", b), ("inputs[0]", b), ('settings["k"]', a)]
    assert replace_arguments(names, args, kwargs, {"x[1][0]": new, "inputs[0]": new, '.settings["k"]': new}) == (
        ((a, [new]), new),
        {"settings": {"k": new}, "flag": True},
    )
    with pytest.raises(SelectionError, match="no argument 'y' in this call, which has x, inputs"):
        replace_arguments(names, args, kwargs, {"y": new})


def test_a_callable_without_signature_has_its_arguments_numbered() -> None:
    assert bind_arguments(ParameterNames.of(3), (1,), {}) == {"args[0]": 1}
