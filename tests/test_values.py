"""Nested values: every kind of container is walked, and rebuilt as what it was."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenterhook.errors import EditError, SelectionError
from tenterhook.values import (
    MAX_DEPTH,
    describe_structure,
    get_slot,
    leaves,
    rebuild,
    register_node,
    same_structure,
)


class T:
    """A leaf."""


a, b, new = T(), T(), T()
Point = namedtuple("Point", "x y")


@dataclass
class Output:
    logits: Any
    loss: Any = None
    cached: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    note: str = "kept"


class Bare:
    __slots__ = ("__hidden", "x")

    def hide(self, value: Any) -> None:
        object.__setattr__(self, "_Bare__hidden", value)

    def hidden(self) -> Any:
        return self.__hidden


@dataclass(frozen=True)
class SlottedByHand(Bare):
    y: Any


class Tagged(list):
    tag = ""


class Named(Point):
    pass


class Checked(namedtuple("Checked", "x y")):
    def __new__(cls, both: Any) -> Checked:
        return super().__new__(cls, *both)


class NestedTensor:
    """As in DETR: a plain object."""

    def __init__(self, tensors: Any, mask: Any) -> None:
        self.tensors = tensors
        self.mask = mask
        self._hidden = tensors


class Module:
    def __init__(self) -> None:
        self.weight = T()

    def __call__(self) -> None: ...


class FrozenMapping(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As in transformers: a mapping with its keys as fields, both kept in step."""

    logits: Any = None
    hidden_states: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden_states"):
            if getattr(self, name) is not None:
                OrderedDict.__setitem__(self, name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelOutput, (self.logits, self.hidden_states)


def tagged() -> Tagged:
    made = Tagged([a, b])
    made.tag = "kept"
    return made


CASES: list[tuple[Any, list[str]]] = [
    ((a, b), ["[0]", "[1]"]),
    ((a, None), ["[0]"]),
    ([a, (b, 1)], ["[0]", "[1][0]"]),
    (deque([a, b], maxlen=2), ["[0]", "[1]"]),
    (tagged(), ["[0]", "[1]"]),
    (Point(a, [b]), [".x", ".y[0]"]),
    (Named(a, b), [".x", ".y"]),
    (Checked((a, b)), [".x", ".y"]),
    ({"logits": a, 3: b, -1: a, None: b, 'q"]': a}, ['["logits"]', "[3]", "[-1]", "[?3]", '["q\\"]"]']),
    (OrderedDict(k=a), ['["k"]']),
    (defaultdict(list, k=[a]), ['["k"][0]']),
    (UserDict(k=a), ['["k"]']),
    (types.MappingProxyType({"k": a}), ['["k"]']),
    (FrozenMapping({"k": a}), ['["k"]']),
    (Output(a, b), [".logits", ".loss"]),
    (Frozen(a), [".x"]),
    (types.SimpleNamespace(x=a, n=1), [".x"]),
    (NestedTensor(a, {"m": b}), [".tensors", '.mask["m"]']),
    (ModelOutput(a, (b, a)), [".logits", ".hidden_states[0]", ".hidden_states[1]"]),
    ([Frozen({"k": (a,)})], ['[0].x["k"][0]']),
]
each_case = pytest.mark.parametrize(("value", "slots"), CASES, ids=lambda part: type(part).__name__)


@each_case
def test_leaves_have_slots_that_lead_back_to_them(value: Any, slots: list[str]) -> None:
    found = leaves(value, T)
    assert [slot for slot, _ in found] == slots
    assert all(get_slot(value, slot) is leaf for slot, leaf in found)
    assert leaves(value, lambda part: isinstance(part, T)) == found
    assert leaves(value, (T, torch.Tensor)) == found


@each_case
def test_rebuilding_replaces_one_leaf_and_keeps_all_else(value: Any, slots: list[str]) -> None:
    before = leaves(value, T)
    for slot in slots:
        made = rebuild(value, {slot: new})
        assert type(made) is type(value)
        assert leaves(made, T) == [(at, new if at == slot else leaf) for at, leaf in before]
        assert same_structure(value, made, T) is None
        assert leaves(value, T) == before


@each_case
def test_rebuilding_with_what_is_there_gives_the_same_object(value: Any, slots: list[str]) -> None:
    assert rebuild(value, dict(leaves(value, T))) is value
    assert rebuild(value, {}) is value


def test_attrs_classes_are_walked_by_their_attributes() -> None:
    attrs = pytest.importorskip("attrs")
    frozen = attrs.make_class("Attrs", ["x", "y"], frozen=True, slots=True)
    value = frozen(x=[a], y=1)
    assert leaves(value, T) == [(".x[0]", a)]
    assert rebuild(value, {".x[0]": new}) == frozen(x=[new], y=1)


def test_what_containers_carry_is_kept() -> None:
    assert rebuild(tagged(), {"[0]": new}).tag == "kept"
    assert rebuild(deque([a], maxlen=7), {"[0]": new}).maxlen == 7
    assert rebuild(defaultdict(list, k=a), {'["k"]': new}).default_factory is list
    assert rebuild(Frozen(a, "other"), {".x": new}) == Frozen(new, "other")
    output = Output(a, b)
    output.cached = b
    assert rebuild(output, {".logits": new}).cached is b
    assert not hasattr(rebuild(Output(a, b), {".logits": new}), "cached")
    nested = rebuild(NestedTensor(a, b), {".mask": new})
    assert (nested.tensors, nested.mask, nested._hidden) == (a, new, a)
    by_hand = SlottedByHand(b)
    object.__setattr__(by_hand, "x", a)
    by_hand.hide(b)
    made = rebuild(by_hand, {".y": new})
    assert (made.x, made.y, made.hidden()) == (a, new, b)


def test_key_and_field_of_a_model_output_stay_in_step() -> None:
    made = rebuild(ModelOutput(a, (b, a)), {".logits": new, ".hidden_states[1]": new})
    assert made["logits"] is made.logits is new
    assert made["hidden_states"] == made.hidden_states == (b, new)


def test_an_output_of_transformers_itself() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(torch.zeros(2), hidden_states=(torch.zeros(1), torch.ones(1)))
    slots = [slot for slot, _ in leaves(value, torch.Tensor)]
    assert slots == [".last_hidden_state", ".hidden_states[0]", ".hidden_states[1]"]
    replacement = torch.ones(2)
    made = rebuild(value, {".last_hidden_state": replacement})
    assert type(made) is type(value)
    assert made["last_hidden_state"] is made.last_hidden_state is made[0] is replacement
    assert made.hidden_states[1] is value.hidden_states[1]


def test_torch_named_tuples_made_in_c_and_packed_sequences() -> None:
    x = torch.arange(4.0)
    packed = torch.nn.utils.rnn.pack_sequence([x, x])
    made = rebuild(packed, {".data": packed.data + 1})
    assert isinstance(made, torch.nn.utils.rnn.PackedSequence)
    assert torch.equal(made.data, packed.data + 1)
    assert made.batch_sizes is packed.batch_sizes
    largest = torch.max(x.reshape(2, 2), 0)
    assert [slot for slot, _ in leaves(largest, torch.Tensor)] == [".values", ".indices"]
    changed = rebuild(largest, {".values": x})
    assert type(changed) is type(largest)
    assert changed.values is x
    assert changed.indices is largest.indices


def test_a_bare_leaf_is_at_the_empty_slot() -> None:
    assert leaves(a, T) == [("", a)]
    assert get_slot(a, "") is a
    assert rebuild(a, {"": new}) is new
    for empty in (None, 3, "text", (), {}, object()):
        assert leaves(empty, T) == []


def test_a_leaf_type_that_is_a_container_is_not_entered() -> None:
    assert leaves([(1, 2)], tuple) == [("[0]", (1, 2))]


def test_modules_and_chains_of_plain_objects_are_left_closed() -> None:
    assert leaves({"model": Module(), "cell": torch.nn.Linear(1, 1)}, (T, torch.Tensor)) == []
    assert [slot for slot, _ in leaves(NestedTensor(NestedTensor(a, a), [b]), T)] == [".mask[0]"]
    two = (NestedTensor(a, b), NestedTensor(a, b))
    assert [slot for slot, _ in leaves(two, T)] == ["[0].tensors", "[0].mask", "[1].tensors", "[1].mask"]


def test_iterators_are_not_used_up() -> None:
    iterator = iter([a, b])
    assert leaves([iterator], T) == []
    assert next(iterator) is a


def test_cycles_and_deep_nesting_end() -> None:
    ring: list[Any] = [a]
    ring += [ring, {"ring": ring}]
    assert leaves(ring, T) == [("[0]", a)]
    assert rebuild(ring, {"[0]": new})[0] is new
    assert same_structure(ring, copy.deepcopy(ring), T) is None
    assert describe_structure(ring, T) == "list(T, list(...), dict(ring=list(...)))"
    deep: Any = a
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert leaves(deep, T) == [("[0]" * MAX_DEPTH, a)]
    assert leaves([deep], T) == []


def test_a_shared_container_is_seen_at_each_of_its_slots() -> None:
    shared = [a]
    assert leaves((shared, shared), T) == [("[0][0]", a), ("[1][0]", a)]


def test_the_outer_of_two_replacements_wins() -> None:
    for order in (["[0]", "[0][1]"], ["[0][1]", "[0]"]):
        assert rebuild([[a, b]], dict.fromkeys(order, new)) == [new]


@pytest.mark.parametrize(
    ("slot", "told"),
    [
        ("[2]", "has [0], [1]"),
        (".x", "has [0], [1]"),
        ('["k"]', "has [0], [1]"),
        ("[0][0]", "at '[0]' has no parts"),
    ],
)
def test_a_slot_that_is_not_there_is_told_with_those_that_are(slot: str, told: str) -> None:
    for ask in (lambda: get_slot((a, b), slot), lambda: rebuild((a, b), {slot: new})):
        with pytest.raises(SelectionError) as caught:
            ask()
        assert f"no slot {slot!r}" in str(caught.value)
        assert told in str(caught.value)


def test_a_mapping_that_cannot_be_made_says_what_to_do() -> None:
    class Odd(FrozenMapping):
        def __init__(self, *, k: Any) -> None:
            super().__init__({"k": k})

    with pytest.raises(EditError, match="register_node"):
        rebuild(Odd(k=a), {'["k"]': new})


def test_a_registered_type_is_walked_as_told_until_taken_back() -> None:
    class Closed:
        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

    class Derived(Closed):
        __slots__ = ()

    value = Derived([a])
    assert leaves(value, T) == []
    unregister = register_node(Closed, lambda v: [(".inner", v.inner)], lambda v, parts: type(v)(parts[".inner"]))
    try:
        assert leaves(value, T) == [(".inner[0]", a)]
        made = rebuild(value, {".inner[0]": new})
        assert type(made) is Derived
        assert made.inner == [new]
    finally:
        unregister()
    assert leaves(value, T) == []


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ((a, None), a, "tuple(T, None) against T"),
        ((a, None), (a, b), "tuple(T, None) against tuple(T, T) (they part at [1])"),
        ((a, b), [a, b], "tuple(T, T) against list(T, T)"),
        ({"x": a}, {"y": a}, "dict(x=T) against dict(y=T)"),
        (Output(a, b), {"logits": a}, "Output(logits=T, loss=T) against dict(logits=T)"),
        ((a, [a] * 12), (a, [a] * 11), "tuple(T, list(12 x T)) against tuple(T, list(11 x T)) (they part at [1])"),
        (a, None, "T against None"),
    ],
)
def test_a_difference_names_both_structures(one: Any, other: Any, told: str) -> None:
    assert same_structure(one, other, T) == told
    assert same_structure(one, copy.copy(one), T) is None


def test_descriptions_stay_short() -> None:
    value = {f"k{number}": [a] * 100 for number in range(50)}
    told = describe_structure([[[[[value]]]], value], T)
    assert told.startswith("list(list(list(list(list(...)))), dict(k0=list(100 x T), ")
    assert told.endswith("... 50 in all))")


trees = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(T)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(), st.none(), st.booleans()), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Frozen, inner),
        st.builds(types.SimpleNamespace, x=inner, y=inner),
    ),
    max_leaves=20,
)


@given(trees)
def test_every_leaf_can_be_replaced_and_put_back(value: Any) -> None:
    found = leaves(value, T)
    assert len({slot for slot, _ in found}) == len(found)
    fresh = {slot: T() for slot, _ in found}
    made = rebuild(value, fresh)
    assert leaves(made, T) == list(fresh.items())
    assert same_structure(value, made, T) is None
    assert leaves(rebuild(made, dict(found)), T) == found
    assert leaves(value, T) == found
