"""Sites and addresses: one spelling, read back as it was written."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenterhook._slots import attribute_step, index_step, key_step, split_slot
from tenterhook.address import (
    Address,
    Kind,
    Site,
    format_place,
    parse_address,
    parse_place,
    parse_site,
    strip_wrappers,
)
from tenterhook.errors import SelectionError

steps = st.one_of(
    st.integers(-3, 300).map(index_step),
    st.from_regex(r"[A-Za-z_]\w{0,5}", fullmatch=True).map(attribute_step),
    st.text(max_size=5).map(key_step),
    st.integers(0, 9).map(lambda position: key_step(None, position)),
)
names = st.one_of(
    st.sampled_from(["conv1", "features.11", "Encoder", "Net", "Net-2", "_orig_mod.module", "md.a/b", "a b", "é.ü"]),
    st.text(min_size=1, max_size=8),
).filter(lambda name: name != "(root)")
addresses = st.builds(
    Address,
    path=st.one_of(st.just(""), names),
    kind=st.sampled_from(Kind),
    slot=st.lists(steps, max_size=4).map("".join),
    model=st.one_of(st.none(), names),
    op=st.one_of(st.just(""), names),
    call=st.one_of(st.none(), st.integers(0, 10**6)),
    step=st.one_of(st.none(), st.integers(0, 10**9)),
)


@given(addresses)
def test_text_of_an_address_reads_back_as_the_same_address(address: Address) -> None:
    assert parse_address(str(address)) == address
    assert parse_site(str(address.site)) == address.site
    assert address.site.at(address.call, address.step) == address


@given(st.one_of(st.none(), names), st.one_of(st.just(""), names), st.one_of(st.just(""), names))
def test_text_of_a_place_reads_back(model: str | None, path: str, op: str) -> None:
    assert parse_place(format_place(path, op=op, model=model)) == (model, path, op)


@given(st.text(alphabet='ab/:#@[]".0 (root)output', max_size=20))
def test_any_text_is_read_or_refused_with_a_selection_error(text: str) -> None:
    try:
        address = parse_address(text)
    except SelectionError as error:
        assert " at position " in str(error)
    else:
        assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lstm:output[1][0]#0@12", Address("lstm", Kind.OUTPUT, "[1][0]", call=0, step=12)),
        ("(root):grad_output", Address("", Kind.GRAD_OUTPUT)),
        ("(root)/relu#1", Address("", Kind.OUTPUT, op="relu", call=1)),
        ("encoder.0/matmul:input.args[0]", Address("encoder.0", Kind.INPUT, "args[0]", op="matmul")),
        ("Net/conv1:output", Address("conv1", Kind.OUTPUT, model="Net")),
        ("Net-2/(root):output", Address("", Kind.OUTPUT, model="Net-2")),
        ("Net/encoder/relu:output", Address("encoder", Kind.OUTPUT, model="Net", op="relu")),
        ("/Encoder/relu:output", Address("Encoder", Kind.OUTPUT, op="relu")),
        ("net/conv1/:output", Address("conv1", Kind.OUTPUT, model="net")),
        ("attn:input.mask[0]@3", Address("attn", Kind.INPUT, "mask[0]", step=3)),
        ("bert:output.hidden_states[3]", Address("bert", Kind.OUTPUT, ".hidden_states[3]")),
        ('bert:output["logits"]', Address("bert", Kind.OUTPUT, '["logits"]')),
        ('m:output["a#1@2]:"]#3', Address("m", Kind.OUTPUT, '["a#1@2]:"]', call=3)),
        ('"md.a/b":output', Address("md.a/b", Kind.OUTPUT)),
        ("fc.weight:param_grad", Address("fc.weight", Kind.PARAM_GRAD)),
    ],
)
def test_examples_of_the_grammar(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("lstm", 4, "expected ':' and a kind"),
        ("", 0, "expected the path of a module"),
        ("lstm:", 5, "expected a kind"),
        ("lstm:outptu", 5, "did you mean 'output'?"),
        ("lstm:output[x]", 11, "expected a slot"),
        ("lstm:output#", 12, "number of the call"),
        ("lstm:output@-1", 12, "number of the step"),
        ("lstm:output@1#2", 13, "or the end"),
        ("a/b/c/d:output", 7, "more than two '/'"),
        ("/relu:output", 0, "(root)"),
        ("encoder/:output", 8, "expected a name"),
        ('"lstm:output', 0, "not closed"),
        ('"a\\q":output', 0, "not a JSON string"),
    ],
)
def test_malformed_text_is_refused_with_position_and_example(text: str, position: int, reason: str) -> None:
    with pytest.raises(SelectionError) as caught:
        parse_address(text)
    assert f"at position {position}: " in str(caught.value)
    assert reason in str(caught.value)
    assert "for example 'lstm:output[1][0]#0@12'" in str(caught.value)


def test_a_site_has_no_call_and_no_step() -> None:
    with pytest.raises(SelectionError, match="'fc:output'"):
        parse_site("fc:output#1")
    with pytest.raises(SelectionError, match="a place has no kind"):
        parse_place("fc:output")


def test_known_models_and_a_default_kind_settle_what_the_text_leaves_open() -> None:
    assert parse_site("net/conv1:output") == Site("net", Kind.OUTPUT, op="conv1")
    assert parse_site("net/conv1:output", models={"net"}) == Site("conv1", Kind.OUTPUT, model="net")
    assert parse_site("conv1", kind=Kind.INPUT) == Site("conv1", Kind.INPUT)


def test_kind_is_its_plain_string() -> None:
    assert Kind.GRAD_INPUT == "grad_input"
    assert f"{Kind.GRAD_INPUT}|{Kind.GRAD_INPUT:>12}|{Kind.GRAD_INPUT!s}" == "grad_input|  grad_input|grad_input"
    assert json.dumps({Kind.PARAM: Kind.PARAM}) == '{"param": "param"}'
    assert ",".join(Kind) == "input,output,grad_input,grad_output,param,param_grad,update"


def test_spellings_are_normalised() -> None:
    assert Site("(root)", "output") == Site("", Kind.OUTPUT)  # type: ignore[arg-type]
    assert Site("a", Kind.INPUT, ".x[0]").slot == "x[0]"
    assert Site("a", Kind.OUTPUT, "logits").slot == ".logits"
    with pytest.raises(SelectionError, match="no kind 'outputs'"):
        Site("a", "outputs")  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="cannot read slot"):
        Site("a", Kind.OUTPUT, "[1")


def test_sites_are_values() -> None:
    site = Site("a", Kind.OUTPUT)
    with pytest.raises(AttributeError):
        site.path = "b"  # type: ignore[misc]
    assert not hasattr(site, "__dict__")
    assert not hasattr(site.at(), "__dict__")
    assert {site: 1}[Site("a", Kind.OUTPUT)] == 1
    assert pickle.loads(pickle.dumps(site.at(1, 2))) == site.at(1, 2)
    assert site != site.at()


def test_sites_sort_by_number_and_then_by_kind() -> None:
    ordered = [
        Site("", Kind.OUTPUT),
        Site("features.2", Kind.OUTPUT),
        Site("features.11", Kind.INPUT),
        Site("features.11", Kind.OUTPUT, "[2]"),
        Site("features.11", Kind.OUTPUT, "[10]"),
        Site("features.11", Kind.GRAD_OUTPUT),
        Site("conv1", Kind.OUTPUT, model="Net"),
    ]
    assert sorted([*ordered[3:], *ordered[:3]]) == ordered


@given(st.lists(addresses, max_size=6))
def test_order_agrees_with_equality(found: list[Address]) -> None:
    for a in found:
        for b in found:
            assert (a < b) + (b < a) + (a == b) == 1
            assert (a <= b) is (a < b or a == b)


@given(st.lists(steps, max_size=5))
def test_a_slot_splits_into_its_steps(parts: list[str]) -> None:
    assert list(split_slot("".join(parts))) == parts


@pytest.mark.parametrize(
    ("raw", "wrappers", "expected"),
    [
        ("module.0", {""}, "0"),
        ("module", {""}, ""),
        ("_orig_mod.module.0", {"", "_orig_mod"}, "0"),
        ("_orig_mod.module.0", {""}, "module.0"),
        ("net.module.fc", set(), "net.module.fc"),
        ("module.module", {""}, "module"),
        ("enc._checkpoint_wrapped_module.fc", {"enc"}, "enc.fc"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", {"", "_fsdp_wrapped_module.a"}, "a.b"),
        ("head.fc", {"head"}, "head.fc"),
        ("", {""}, ""),
    ],
)
def test_only_what_wrappers_put_in_is_stripped(raw: str, wrappers: set[str], expected: str) -> None:
    assert strip_wrappers(raw, wrappers) == expected
