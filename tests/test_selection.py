"""The filter language: what each form means, and what somebody is told whose selection matches nothing."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenterhook._globs import glob_pattern
from tenterhook.errors import SelectionError
from tenterhook.selection import Entry, check_patterns, describe, resolve


class Layer:
    def __call__(self) -> None: ...


class Conv(Layer): ...


class Conv2d(Conv): ...


class ModuleList(Layer):
    def __iter__(self):
        return iter(())


def entry(path: str, cls: type = Layer, **more: object) -> Entry:
    names = tuple(base.__name__ for base in cls.__mro__[:-1])
    return Entry(path, cls(), type_names=names, **more)  # type: ignore[arg-type]


FEATURES = [f"features.{index}" for index in range(13)]
ATTENTIONS = [f"encoder.layers.{index}.attn" for index in range(3)]


@pytest.fixture
def entries() -> list[Entry]:
    return [
        entry(""),
        entry("features", Conv),
        *(entry(path, Layer if index % 2 else Conv2d) for index, path in enumerate(FEATURES)),
        entry("encoder"),
        entry("encoder.layers", ModuleList, callable=False),
        *(entry(f"encoder.layers.{index}") for index in range(3)),
        *(entry(path) for path in ATTENTIONS),
        entry("attn"),
        entry("emb", aliases=("head.tied",)),
    ]


@pytest.fixture
def container(entries: list[Entry]) -> object:
    return next(found.module for found in entries if found.path == "encoder.layers")


def paths(selection: object, entries: Sequence[Entry], **more: object) -> list[str]:
    return [found.path for found in resolve(selection, entries, **more)]  # type: ignore[arg-type]


def message(selection: object, entries: Sequence[Entry], **more: object) -> str:
    with pytest.raises(SelectionError) as caught:
        resolve(selection, entries, **more)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("features.11", ["features.11"]),
        ("features.*", FEATURES),
        ("features.1?", FEATURES[10:]),
        ("features.[0-2]", FEATURES[:3]),
        ("features.1[!0,1]", ["features.12"]),
        ("feat*", ["features"]),
        ("*", ["features", "encoder", "attn", "emb"]),
        ("**.attn", [*ATTENTIONS, "attn"]),
        ("encoder.**.attn", ATTENTIONS),
        ("encoder.**.layers", ["encoder.layers"]),
        ("encoder.layers.1.**", ["encoder.layers.1.attn"]),
        ("(root)", [""]),
        ("", [""]),
        ("attn, features.0", ["features.0", "attn"]),
        ("features.*,!features.?,!features.1[01]", ["features.12"]),
        (["features.0", "attn", "features.0"], ["features.0", "attn"]),
        ("re:features\\.1{2,3}", ["features.11"]),
        ("attn,re:features\\.(1{0,1})2", ["features.2", "features.12", "attn"]),
        ("head.tied", ["emb"]),
        ("head.*", ["emb"]),
        (re.compile("ATTN", re.I), ["attn"]),
        (lambda path, module: path > "features.1" and isinstance(module, Conv2d), FEATURES[2::2]),
        ((text for text in ["attn", "emb"]), ["attn", "emb"]),
        ([["attn"], ("emb", "!attn")], ["emb"]),
    ],
)
def test_what_each_form_selects(entries: list[Entry], selection: object, expected: list[str]) -> None:
    found = paths(selection, entries)
    assert sorted(found) == sorted(expected)
    assert found == [one.path for one in entries if one.path in found]


def test_everything_and_everything_but(entries: list[Entry]) -> None:
    everything = [found.path for found in entries]
    assert paths(None, entries) == paths("**", entries) == everything
    assert paths("!**.attn", entries) == [path for path in everything if path.rpartition(".")[2] != "attn"]
    assert paths(["!(root)", "!encoder.**"], entries) == [
        path for path in everything if path and not path.startswith("encoder.")
    ]
    assert paths("**.*", entries) == everything[1:]


def test_types_match_by_class_and_by_name(entries: list[Entry]) -> None:
    even = FEATURES[::2]
    assert paths(Conv2d, entries) == paths("type:Conv2d", entries) == even
    assert paths(Conv, entries) == paths("type:Conv", entries) == paths("type:Conv*", entries) == ["features", *even]
    assert paths("type:Conv,!type:*2d", entries) == ["features"]


def test_a_module_is_matched_by_identity_though_it_is_callable_or_iterable(
    entries: list[Entry], container: object
) -> None:
    assert paths(entries[3].module, entries) == ["features.1"]
    assert paths([entries[3].module, entries[0].module], entries) == ["", "features.1"]
    assert paths(container, entries) == ["encoder.layers"]
    for stranger in (Conv2d(), ModuleList()):
        assert "not part of the model" in message(stranger, entries)


def test_a_name_that_exists_wins_over_its_reading_as_a_pattern() -> None:
    odd = [entry("a[0]"), entry("a0"), entry("*"), entry("b")]
    assert paths("a[0]", odd) == ["a[0]"]
    assert paths("*", odd) == ["*"]


def test_a_pattern_means_the_same_on_a_wrapped_model() -> None:
    bare = [entry(""), entry("net"), entry("net.0")]
    wrapped = [
        entry("", raw_path="module"),
        entry("net", raw_path="module.net"),
        entry("net.0", raw_path="module.net.0"),
    ]
    for selection in ("*", "*.*", "**", "re:.*0", "net.*"):
        assert paths(selection, wrapped) == paths(selection, bare)
    assert paths("module.net", wrapped) == ["net"]
    assert paths("module.net.*", wrapped) == ["net.0"]


def test_a_canonical_path_wins_over_a_raw_one() -> None:
    assert paths("module", [entry("", raw_path="module"), entry("module", raw_path="module.module")]) == ["module"]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (
            "encoder.layer.*",
            "no module matches 'encoder.layer.*' (25 known)\n  nearest: 'encoder.layers.*' (3 modules)",
        ),
        ("Features.3", "no module matches 'Features.3' (25 known)\n  nearest: 'features.3'"),
        ("features.99", "nearest: 'features.12', 'features.11', 'features.10'"),
        ("bert.encoder.layers.1.attn", "nearest: 'encoder.layers.1.attn'"),
        ("layers.1.attn", "nearest: 'encoder.layers.1.attn'"),
        ("attn:output", "nearest: 'attn'"),
        ("attn:output[0]#1", "':output' is a part of an address in a recording; here a module is selected"),
        ("emb.**", "no module matches 'emb.**' (25 known)\n  nearest: 'emb'"),
        ("type:conv2D", "nearest: 'type:Conv2d' (7)"),
        ("type:Transformer", "types known: 'type:Layer'"),
        ("zzz", "known are 'features', 'features.0'"),
        ("re:atn", "must match the whole path"),
        (re.compile("feat"), "must match the whole path"),
        (dict, "no module matches 'type:dict'"),
        (lambda path, module: False, "the predicate was false for each"),
        (["attn", "atn"], "no module matches 'atn' (25 known)\n  nearest: 'attn'"),
    ],
)
def test_no_match_names_the_nearest(entries: list[Entry], selection: object, expected: str) -> None:
    assert expected in message(selection, entries)


def test_names_that_several_models_have_are_named_once(entries: list[Entry]) -> None:
    assert message("features.99", [*entries, *entries]).count("'features.12'") == 1


@pytest.mark.parametrize("text", ["attn", "h.[0-3].mlp,!h.1", "re:h\\.\\d+", "type:Conv*", "", "no.such.thing"])
def test_a_text_can_be_read_before_there_is_a_model(text: str) -> None:
    check_patterns(text)


@pytest.mark.parametrize("text", ["re:(", "a,,b", "a[", "type:", "!", "conv**"])
def test_a_malformed_text_is_refused_before_there_is_a_model(text: str) -> None:
    with pytest.raises(SelectionError, match="cannot read"):
        check_patterns(text)


def test_at_most_five_are_named(entries: list[Entry]) -> None:
    assert message("features.99", entries).count("'features.") == 1 + 5


@pytest.mark.parametrize("name", ["attn.weight", "*.weight"])
def test_the_name_of_a_parameter_is_recognised(entries: list[Entry], name: str) -> None:
    told = message(name, entries, parameters={"attn.weight", "fc.bias"})
    assert "the name of a parameter, such as 'attn.weight'" in told
    assert f"param_grad({name!r}" in told


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        ("re:a(b", "at position 1"),
        ("attn,,emb", "at position 5: an item is empty"),
        ("attn,", "an item is empty"),
        ("!", "an item is empty"),
        ("!!attn", "one '!' is enough"),
        ("conv**", "stands alone between dots"),
        ("emb,h.[0-3", "at position 2: the '[' is not closed"),
        ("type:", "expected the name of a class"),
        (3, "cannot select by 3 (int)"),
        ({"attn": 1}, "cannot select by"),
        ([b"attn"], "cannot select by b'attn'"),
        (re.compile(b"a"), "compile the pattern from str"),
        ([], "it has no items"),
        ("attn,!attn", "its excludes leave nothing"),
    ],
)
def test_what_cannot_be_read_says_why(entries: list[Entry], selection: object, reason: str) -> None:
    assert reason in message(selection, entries)


def test_a_predicate_that_raises_is_the_users_error_with_a_note(entries: list[Entry]) -> None:
    def predicate(path: str, module: object) -> bool:
        return bool(1 / (path != "features.1"))

    with pytest.raises(ZeroDivisionError) as caught:
        resolve(predicate, entries)
    if sys.version_info >= (3, 11):
        assert "'features.1'" in "".join(caught.value.__notes__)


def test_containers_that_are_never_called(entries: list[Entry], container: object) -> None:
    for selection in ("encoder.layers", container, "type:ModuleList", ModuleList, "re:encoder.layers"):
        told = message(selection, entries, require_callable=True)
        assert "never called" in told
        assert "'encoder.layers.*'" in told
    assert paths("encoder.*", entries) == ["encoder.layers"]
    assert "encoder.layers" not in paths("**", entries, require_callable=True)
    assert "encoder.layers" not in paths("!attn", entries, require_callable=True)
    assert paths("encoder.**,!**.attn,!encoder.layers", entries, require_callable=True) == [
        f"encoder.layers.{index}" for index in range(3)
    ]


def test_description_can_be_given_back(entries: list[Entry], container: object) -> None:
    def wanted(path: str, module: object) -> bool:
        return True

    selection = [Conv, "!features.0,re:a{1,2}ttn|attn", re.compile("EMB", re.I), ""]
    texts = describe(selection)
    assert texts == ["type:Conv", "!features.0", "re:a{1,2}ttn|attn", "re:(?i)EMB", "(root)"]
    assert paths(texts, entries) == paths(selection, entries)
    assert describe(None) == ["**"]
    assert describe([wanted]) == ["<predicate test_description_can_be_given_back.<locals>.wanted>"]
    assert describe(container) == ["<module ModuleList>"]


level_globs = st.one_of(
    st.sampled_from(["**", "*"]),
    st.lists(st.sampled_from(["a", "b", "1", "?", "*", "[ab]", "[!a]", "[a-b1]"]), min_size=1, max_size=3)
    .map("".join)
    .filter(lambda level: "**" not in level),
)
dotted_paths = st.lists(st.text(alphabet="ab1", min_size=1, max_size=3), max_size=4).map(".".join)


def matches_naively(globs: list[str], path: list[str]) -> bool:
    """Match level by level, as the definition says."""
    if not globs:
        return not path
    if globs[0] == "**":
        least = 1 if len(globs) == 1 else 0  # at the end, ** is at least one level
        return any(matches_naively(globs[1:], path[at:]) for at in range(least, len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], globs[0]) and matches_naively(globs[1:], path[1:])


@given(st.lists(level_globs, min_size=1, max_size=4), st.lists(dotted_paths, max_size=12, unique=True))
def test_patterns_agree_with_matching_level_by_level(globs: list[str], known: list[str]) -> None:
    once = [glob for at, glob in enumerate(globs) if (glob, *globs[max(at - 1, 0) : at]) != ("**", "**")]
    text = ".".join(globs)
    if text in known:
        expected = [text]
    elif once == ["**"]:
        expected = known
    else:
        expected = [path for path in known if matches_naively(once, path.split(".") if path else [])]
    found = [entry(path) for path in known]
    if expected:
        assert paths(text, found) == expected
    else:
        assert "no module matches" in message(text, found)


@given(st.text(alphabet="ab.*?[]!-^\\,", max_size=10))
def test_any_text_is_a_pattern_or_is_refused(text: str) -> None:
    try:
        pattern = glob_pattern(text)
    except SelectionError as error:
        assert repr(text) in str(error)
    else:
        assert not pattern.fullmatch("z\ny") or "*" in text or "?" in text or "[!" in text


def test_a_class_in_brackets_never_matches_a_dot() -> None:
    assert glob_pattern("a[!x]b").fullmatch("a.b") is None
    assert glob_pattern("a[+-9]b").fullmatch("a.b") is None
    assert glob_pattern("a[+-9]b").fullmatch("a5b")
    assert glob_pattern("a[]^]b").fullmatch("a^b")
