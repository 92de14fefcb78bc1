"""Names of what a hook can look at: kinds, slots, sites and addresses, with one spelling for all of them.

A full address is written ``path:kind slot#call@step`` without the blank, for example ``lstm:output[1][0]#0@12``:

* **place** ``model/path/op``. The path of the root module is written ``(root)``. Model and op may be left out:

  * no slash: a module (``features.11``);
  * one slash: where the left part looks like a class (no dot, first letter a capital: ``Net``, ``Net-2``) it is the
    model, ``Net/conv1``; else it is a module and the right part an op that ran in it, ``(root)/relu``, ``enc.0/add``;
  * two slashes: all three, ``Net/encoder/relu``. An empty model is "not said", an empty op "the module itself", so that
    ``/Encoder/relu`` is an op in a module named like a class, and ``net/conv1/`` a module of a model that is not.

  A path or op with one of the signs of this grammar in it (``"md.a/b"``) is quoted as a JSON string.
* **kind** one of :class:`Kind`. An op without a kind means its ``output`` (``(root)/relu#1``).
* **slot** steps into a nested value: ``[0]`` of a sequence or an int key, ``.name`` of a field, ``["key"]`` of a
  mapping, ``[?2]`` the third item of a mapping if its key is neither str nor int. What belongs to the arguments or
  parameters of a module starts with a name: slot ``mask[0]`` of kind ``input`` is written ``attn:input.mask[0]``.
* **call** and **step** count from 0.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from tenterhook._slots import IDENTIFIER, SLOT_STEP, STRING, malformed, split_slot
from tenterhook.errors import SelectionError

__all__ = [
    "ROOT",
    "WRAPPER_COMPONENTS",
    "Address",
    "Kind",
    "Site",
    "format_place",
    "parse_address",
    "parse_place",
    "parse_site",
    "split_op",
    "strip_wrappers",
]

ROOT = "(root)"
"""How the root module, whose path is the empty string, is written."""

WRAPPER_COMPONENTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which wrappers keep the module that they wrap."""

_PLAIN = re.compile(r'[^/:#@"\s]+')
_QUOTED = re.compile(STRING)
_CLASS_NAME = re.compile(r"_*[^\W\d_a-z][\w-]*")
_COUNT = re.compile(r"[0-9]+")


class Kind(str, Enum):
    """What is looked at; each member is also the plain string that files and options hold."""

    INPUT = "input"
    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_OUTPUT = "grad_output"
    PARAM = "param"
    PARAM_GRAD = "param_grad"
    UPDATE = "update"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


_KIND_ORDER = {kind: place for place, kind in enumerate(Kind)}
# Their values are bound to names, so their slots start with a bare name; the others' start with '.' or '['.
_NAMED_KINDS = frozenset({Kind.INPUT, Kind.GRAD_INPUT, Kind.PARAM, Kind.PARAM_GRAD, Kind.UPDATE})


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Site:
    """A module, or an op that runs in one, together with the kind and the slot that are looked at.

    Sites sort by model, path, op, kind and slot, with numbers by value (``features.2`` before ``features.11``).

    Attributes:
        path: Path of the module, ``""`` for the root (``"(root)"`` is accepted and turned into it).
        kind: What is looked at; a plain string is turned into a :class:`Kind`.
        slot: Where in a nested value, ``""`` for the whole; the spelling is normalised to the kind.
        model: Name of the model, None where it is not said.
        op: Name of a function that ran directly in the module, ``""`` for the module itself.

    Raises:
        SelectionError: The kind does not exist or the slot is malformed.
    """

    path: str
    kind: Kind
    slot: str = ""
    model: str | None = None
    op: str = ""

    def __post_init__(self) -> None:
        if self.path == ROOT:
            object.__setattr__(self, "path", "")
        if self.model == "":
            object.__setattr__(self, "model", None)
        if type(self.kind) is not Kind:
            object.__setattr__(self, "kind", _kind(self.kind, self.kind, 0))
        if self.slot:
            object.__setattr__(self, "slot", _normal_slot(self.slot, self.kind))

    def __str__(self) -> str:
        slot = self.slot if self.slot[:1] in ("", ".", "[") else f".{self.slot}"
        return f"{self.place}:{self.kind}{slot}"

    def __lt__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._key() < other._key()

    def _key(self) -> tuple[object, ...]:
        numbers = (_natural(self.path), _natural(self.op), _KIND_ORDER[self.kind], _natural(self.slot))
        # The spelling settles what numbers cannot (a01 and a1), so that order agrees with equality.
        return (self.model is not None, self.model or "", *numbers, self.path, self.op, self.slot)

    @property
    def place(self) -> str:
        """The text before the kind, for example ``Net/conv1`` or ``(root)/relu``."""
        return format_place(self.path, op=self.op, model=self.model)

    def at(self, call: int | None = None, step: int | None = None) -> Address:
        """Return the address of one call in one step at this site."""
        return Address(self.path, self.kind, self.slot, self.model, self.op, call, step)


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Address(Site):
    """A site in one call of one step.

    Addresses sort by site, then step, then call.

    Attributes:
        call: Number of the call within the step, from 0; None where it is not said.
        step: Number of the step, from 0; None where it is not said.
    """

    call: int | None = None
    step: int | None = None

    # Slotted dataclasses are created twice, so zero-argument super() would look at the wrong class.
    def __str__(self) -> str:
        call = "" if self.call is None else f"#{self.call}"
        step = "" if self.step is None else f"@{self.step}"
        return f"{Site.__str__(self)}{call}{step}"

    def __lt__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._key() < other._key()

    def _key(self) -> tuple[object, ...]:
        return (*Site._key(self), -1 if self.step is None else self.step, -1 if self.call is None else self.call)

    @property
    def site(self) -> Site:
        """The site, without call and step."""
        return Site(self.path, self.kind, self.slot, self.model, self.op)

    def at(self, call: int | None = None, step: int | None = None) -> Address:
        """Return this address with another call and step."""
        return replace(self, call=call, step=step)


def parse_address(text: str, *, kind: Kind | None = None, models: Collection[str] = ()) -> Address:
    """Read an address; ``str`` of the result gives the text back.

    Args:
        text: For example ``lstm:output[1][0]#0@12``.
        kind: Kind to take where the text names none; without it a text with no kind is an error, except for an op.
        models: Known names of models; where one of them stands before the first slash it is the model, whatever it
            looks like.

    Raises:
        SelectionError: The text is malformed; the message holds the position.
    """
    place_end = _place_end(text)
    model, path, op = _place(text, text[:place_end], models)
    position = place_end
    if text[position : position + 1] == ":":
        found = IDENTIFIER.match(text, position + 1)
        if found is None:
            raise _malformed(text, position + 1, f"expected a kind ({', '.join(Kind)})")
        kind = _kind(found[0], text, position + 1)
        position = found.end()
    elif kind is None and op:
        kind = Kind.OUTPUT
    elif kind is None:
        raise _malformed(text, position, f"expected ':' and a kind ({', '.join(Kind)})")
    start = position
    while (found := SLOT_STEP.match(text, position)) is not None:
        position = found.end()
    slot = text[start:position]
    call, position = _count(text, position, "#", "call")
    step, position = _count(text, position, "@", "step")
    if position != len(text):
        raise _malformed(text, position, "expected a slot, '#call', '@step' or the end")
    return Address(path, kind, slot, model, op, call, step)


def parse_site(text: str, *, kind: Kind | None = None, models: Collection[str] = ()) -> Site:
    """Read a site, which is an address without call and step.

    Args:
        text: For example ``features.11:output`` or ``attn:input.mask``.
        kind: As in :func:`parse_address`.
        models: As in :func:`parse_address`.

    Raises:
        SelectionError: The text is malformed, or names a call or a step.
    """
    address = parse_address(text, kind=kind, models=models)
    if address.call is not None or address.step is not None:
        raise SelectionError(
            f"{text!r} names a call or a step, and a site has neither; leave out '#call@step': {str(address.site)!r}"
        )
    return address.site


def parse_place(text: str, *, models: Collection[str] = ()) -> tuple[str | None, str, str]:
    """Read the text before the kind and return model, path and op.

    Raises:
        SelectionError: The text is malformed, or more follows.
    """
    end = _place_end(text)
    if end != len(text):
        raise _malformed(text, end, "expected the end: a place has no kind, call or step")
    return _place(text, text, models)


def format_place(path: str, *, op: str = "", model: str | None = None) -> str:
    """Write a place in the shortest form that :func:`parse_place` reads back."""
    written = _quote(path) if path else ROOT
    if model is None:
        if not op:
            return written
        return f"{'/' if _CLASS_NAME.fullmatch(written) else ''}{written}/{_quote(op)}"
    name = _quote(model)
    if op or not _CLASS_NAME.fullmatch(name):
        return f"{name}/{written}/{_quote(op) if op else ''}"
    return f"{name}/{written}"


def split_op(stored: str) -> tuple[str, str]:
    """Split what the column ``path`` of a recording holds into path and op.

    Rows of a functional call hold its place without the model there (:func:`format_place`), those of a module its path.

    >>> split_op("(root)/relu"), split_op("features.11")
    (('', 'relu'), ('features.11', ''))
    """
    if "/" not in stored:
        return stored, ""
    try:
        model, path, op = parse_place(stored)
    except SelectionError:  # a module's name may hold any sign
        return stored, ""
    return (path, op) if model is None and op.isidentifier() else (stored, "")


def strip_wrappers(raw_path: str, wrapper_prefixes: Collection[str]) -> str:
    """Take the components that wrappers put into a path out of it.

    A component goes where the module just before it is a wrapper and the component is one of
    :data:`WRAPPER_COMPONENTS`; a user's own module that happens to be called ``module`` stays.

    >>> strip_wrappers("_orig_mod.module.net.module", {"", "_orig_mod"})
    'net.module'

    Args:
        raw_path: Path as the framework gives it.
        wrapper_prefixes: Raw paths of the modules that are wrappers (the outer ones, ``""`` for the root), not of the
            modules that they wrap. A set is fastest.
    """
    if not wrapper_prefixes or not raw_path:
        return raw_path
    kept: list[str] = []
    before = ""
    for component in raw_path.split("."):
        if component not in WRAPPER_COMPONENTS or before not in wrapper_prefixes:
            kept.append(component)
        before = f"{before}.{component}" if before else component
    return ".".join(kept)


@functools.lru_cache(maxsize=4096)
def _normal_slot(slot: str, kind: Kind) -> str:
    steps = split_slot(slot)
    if kind in _NAMED_KINDS:
        return slot[1:] if slot[0] == "." else slot
    return slot if steps[0][0] in ".[" else f".{slot}"


@functools.lru_cache(maxsize=4096)
def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    parts = re.split(r"([0-9]+)", text)
    return tuple((0, int(part), "") if number % 2 else (1, 0, part) for number, part in enumerate(parts) if part)


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _place_end(text: str) -> int:
    position = 0
    while position < len(text):
        if text[position] == '"':
            found = _QUOTED.match(text, position)
            if found is None:
                raise _malformed(text, position, "the quote is not closed")
            position = found.end()
        elif text[position] in ":#@":
            return position
        else:
            position += 1
    return position


def _place(text: str, place: str, models: Collection[str]) -> tuple[str | None, str, str]:
    parts: list[str | None] = []
    written: list[str] = []
    position = 0
    while True:
        found = _QUOTED.match(place, position) or _PLAIN.match(place, position)
        written.append("" if found is None else found[0])
        parts.append("" if found is None else _unquote(text, found[0], position))
        position = position if found is None else found.end()
        if position == len(place):
            break
        if place[position] != "/":
            raise _malformed(text, position, "expected '/', ':' or the end of the name")
        position += 1
    if len(parts) == 2:
        is_model = parts[0] in models or bool(_CLASS_NAME.fullmatch(written[0]))
        parts, written = ([*parts, ""], [*written, ""]) if is_model else (["", *parts], ["", *written])
        if not written[0 if is_model else 2]:
            raise _malformed(text, len(place), "expected a name after '/'")
    elif len(parts) == 1:
        parts, written = ["", *parts, ""], ["", *written, ""]
    elif len(parts) > 3:
        raise _malformed(text, len(place), "more than two '/'; quote a name that has one: '\"md.a/b\":output'")
    if not written[1]:
        raise _malformed(text, len(written[0]), f"expected the path of a module; the root is written {ROOT}")
    model, path, op = parts
    return (model or None), (path or "") if written[1] != ROOT else "", op or ""


def _unquote(text: str, written: str, position: int) -> str:
    if written[0] != '"':
        return written
    try:
        return json.loads(written)
    except ValueError:
        raise _malformed(text, position, "the quoted name is not a JSON string") from None


def _kind(name: str, text: str, position: int) -> Kind:
    try:
        return Kind(name)
    except ValueError:
        near = difflib.get_close_matches(str(name), [kind.value for kind in Kind], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        message = f"there is no kind {str(name)!r}; {hint}kinds: {', '.join(Kind)}"
        raise _malformed(str(text), position, message) from None


def _count(text: str, position: int, sign: str, what: str) -> tuple[int | None, int]:
    if text[position : position + 1] != sign:
        return None, position
    found = _COUNT.match(text, position + 1)
    if found is None:
        raise _malformed(text, position + 1, f"expected the number of the {what} after '{sign}'")
    return int(found[0]), found.end()


def _malformed(text: str, position: int, reason: str) -> SelectionError:
    return malformed("address", text, position, reason, "lstm:output[1][0]#0@12")
