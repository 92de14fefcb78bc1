"""What somebody asks to see of a recording: patterns, or addresses as they are printed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tenterhook._slots import SLOT_STEP
from tenterhook.address import ROOT, Kind, format_place, parse_place, parse_site
from tenterhook.errors import SelectionError
from tenterhook.recording import Recording
from tenterhook.selection import Entry, check_patterns, resolve

__all__ = ["Asked", "Part", "check", "parts_of", "split"]

_END = re.compile(
    rf"(?s:(?P<place>.*?))(?::(?P<kind>{'|'.join(Kind)})(?P<slot>(?!\w)(?:{SLOT_STEP.pattern})*))?"
    r"(?:#(?P<call>\d+))?(?:@(?P<step>\d+))?"
)
_MAYBE_KIND = re.compile(r"(?P<place>(?!!?re:)[^:\"]+):(?P<kind>[^\W\d]\w*)")
_WORDS = ("type", "re", "!type", "!re")


@dataclass(frozen=True)
class Asked:
    """A text taken apart.

    Attributes:
        place: the pattern, or the place of an address.
        kind: the kind that alone is meant, None for all.
        slot: where in the value, empty for all of it.
        call: the call that alone is meant, None for all.
        step: the step that alone is meant, None for all.
    """

    place: str
    kind: Kind | None = None
    slot: str = ""
    call: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Part:
    """What is asked of one module, or of one function in it.

    Attributes:
        model: the model.
        path: what the column ``path`` holds.
        asked: which of its rows are meant.
    """

    model: str
    path: str
    asked: Asked

    def means_call(self, call: int, step: int) -> bool:
        """Whether a call is among what is asked for."""
        return self.asked.call in (None, call) and self.asked.step in (None, step)

    def means_value(self, kind: str, slot: str) -> bool:
        """Whether a value of such a call is, too."""
        asked = self.asked
        return asked.kind in (None, kind) and (not asked.slot or slot == asked.slot or _is_in(slot, asked.slot))


def _is_in(slot: str, outer: str) -> bool:
    return slot.startswith(outer) and slot[len(outer) : len(outer) + 1] in (".", "[")


def split(text: str) -> Asked:
    """Take a text apart: ``features.*``, ``type:Conv2d``, ``fc:grad_output``, ``Net/lstm:output[1][0]#0@12``, ``fc#0@3``.

    Raises:
        SelectionError: it is empty, or names a kind that does not exist.
    """
    found = _END.fullmatch(text.strip())
    if not text.strip() or found is None:
        raise SelectionError(f"{text!r} names nothing; the outermost module is written {ROOT}")
    place, kind, slot = found["place"], found["kind"], found["slot"] or ""
    odd = _MAYBE_KIND.fullmatch(place)
    if kind is None and odd is not None and odd["place"].rpartition("/")[2] not in _WORDS:
        parse_site(place)  # which says what kinds there are
    if kind is not None:
        slot = parse_site(f"x:{kind}{slot}").slot
    call, step = (None if found[name] is None else int(found[name]) for name in ("call", "step"))
    return Asked(place or ROOT, None if kind is None else Kind(kind), slot, call, step)


def check(text: str) -> None:
    """Read a text without asking what it matches.

    Raises:
        SelectionError: it is malformed.
    """
    place = split(text).place
    if '"' in place:
        parse_place(place)
    else:
        check_patterns(place)


def parts_of(recording: Recording, texts: Collection[str]) -> list[Part]:
    """Say what of a recording some texts mean, in its own order.

    Raises:
        SelectionError: a text is malformed, or matches nothing that was recorded.
    """
    types = {(row["model"], row["path"]): row["type"] for row in recording.table("modules").to_pylist()}
    entries: dict[str, list[Entry]] = {}
    for model, path in recording.paths:
        names = (types[model, path],) if types.get((model, path)) else ()
        entries.setdefault(model, []).append(Entry(path, None, type_names=names))
    found: list[Part] = []
    for text in texts:
        asked = split(text)
        those = _named(asked.place, entries)
        if not those:
            model, pattern = _of_model(asked.place, entries)
            known = [(name, entry) for name in entries if model in (None, name) for entry in entries[name]]
            keep = {id(entry) for entry in resolve(pattern, [entry for _, entry in known], what="recorded module")}
            those = [(name, entry.path) for name, entry in known if id(entry) in keep]
        found += [Part(name, path, asked) for name, path in those]
    return found


def _named(place: str, entries: Mapping[str, Sequence[Entry]]) -> list[tuple[str, str]]:
    """Find what a place names outright, as places are printed; nothing where it is a pattern."""
    try:
        model, path, op = parse_place(place, models=list(entries))
    except SelectionError:  # a pattern
        return []
    stored = format_place(path, op=op) if op else path
    return [
        (name, entry.path)
        for name in entries
        if model in (None, name)
        for entry in entries[name]
        if entry.path == stored
    ]


def _of_model(place: str, entries: Collection[str]) -> tuple[str | None, str]:
    """Split a place into the model that it names, if any, and the pattern for what is in it."""
    if place in entries:
        return place, ROOT
    model, slash, rest = place.partition("/")
    if slash and model in entries and rest:
        return model, rest
    return None, place
