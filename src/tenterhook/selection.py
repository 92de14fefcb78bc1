r"""The filter language: which modules a selection means.

A selection is one of, or a list (tuple, set, iterator) of:

* **text**, several items with commas between them:

  ===================  ==========================================================================================
  ``features.11``      that module; a name that exists wins over its reading as a pattern
  ``(root)`` or empty  the root
  ``features.*``       one level below; ``*``, ``?``, ``[0-3]`` and ``[!0-3]`` stand for part of a level: ``conv*``
  ``**``               everything, with the root
  ``encoder.**``       everything below ``encoder``, at any depth, without ``encoder`` itself
  ``**.attn``          ``attn`` at any depth, the top included; ``a.**.b`` likewise includes ``a.b``
  ``re:h\.\d+\.mlp``    a regular expression that the whole path must match; it takes the rest of the text, commas too
  ``type:Conv2d``      modules of a class of this name, or of one derived from it; patterns allowed: ``type:Conv*``
  ``!features.0``      leaves out, of what the others select, whatever follows the ``!``
  ===================  ==========================================================================================

* a **class** (and those derived from it), a **compiled regular expression** (the whole path must match),
* a **module** (that very object), a **predicate** ``(path, module) -> bool``, or **None** for everything.

Only excludes: they are taken out of everything. Patterns are tried on paths and aliases, and only where neither matches
on raw paths (with the wrappers' components), so that a pattern means the same on a wrapped and on a bare model. Each
item that is not an exclude must match something, else it is an error that lists the nearest names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from tenterhook._globs import GLOB_SIGNS, class_end, glob_pattern
from tenterhook._nearest import nearest, parameter_hint
from tenterhook.address import ROOT, Kind
from tenterhook.errors import SelectionError

__all__ = ["Entry", "Predicate", "Selection", "check_patterns", "describe", "glob_pattern", "resolve"]

Predicate: TypeAlias = Callable[[str, Any], bool]
"""Takes the path and the module."""

# Any object may be a module, so a type checker cannot tell more than this.
Selection: TypeAlias = Union[str, type, "re.Pattern[str]", Predicate, Iterable[Any], object, None]
"""What may be given as a selection; see the module's docstring."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One module that can be selected.

    Attributes:
        path: Canonical path, without wrappers; ``""`` for the root.
        module: The module itself.
        aliases: Its other paths.
        raw_path: Path as the framework gives it; ``""`` where it is the same as ``path``.
        type_names: Names of its class and of the classes that it derives from, most derived first.
        callable: False for containers that are never called (``ModuleList``), which a hook would wait for in vain.
    """

    path: str
    module: object = field(compare=False)
    aliases: tuple[str, ...] = ()
    raw_path: str = ""
    type_names: tuple[str, ...] = ()
    callable: bool = True


@dataclass(frozen=True, slots=True)
class _Item:
    """One item of a selection: how it is written, what it leaves out or takes, and how it is matched."""

    text: str
    exclude: bool
    value: Any  # str without '!', or one of the Python forms


def resolve(
    selection: Selection,
    entries: Sequence[Entry],
    *,
    what: str = "module",
    parameters: Collection[str] = (),
    require_callable: bool = False,
) -> list[Entry]:
    """Return the entries that a selection means, in their own order, each once.

    Args:
        selection: See the module's docstring.
        entries: All that could be selected.
        what: Singular noun for messages.
        parameters: Names of the model's parameters, so that a parameter's name gets an answer of its own.
        require_callable: Leave out what is never called, and raise where exactly such a container is named.

    Raises:
        SelectionError: An item is malformed, or matches nothing.
    """
    items = list(_items(selection, entries))
    chosen: set[int] = set()
    left_out: set[int] = set()
    for item in items:
        matched, exact = _match(item, entries)
        if item.exclude:
            left_out.update(matched)
            continue
        if require_callable:
            never = [index for index in matched if not entries[index].callable]
            if never and (exact or len(never) == len(matched)):
                raise _never_called(item, [entries[index] for index in never], entries)
            matched = [index for index in matched if entries[index].callable]
        if not matched:
            raise _nothing(item, entries, what, parameters)
        chosen.update(matched)
    if items and all(item.exclude for item in items):
        chosen = {index for index, entry in enumerate(entries) if entry.callable or not require_callable}
    kept = chosen - left_out
    if not kept:
        texts = ", ".join(repr(item.text) for item in items) or "an empty list"
        reason = "its excludes leave nothing of it" if items else "it has no items; use None or '**' for everything"
        raise SelectionError(f"no {what} is selected by {texts} ({len(entries)} known): {reason}")
    return [entry for index, entry in enumerate(entries) if index in kept]


def check_patterns(text: str) -> None:
    """Read a text as a selection without asking what it matches, so that a mistyped one is refused before anything runs.

    Raises:
        SelectionError: An item is malformed.
    """
    for item in _text_items(text):
        _match_text(item, item.value, ())


def describe(selection: Selection) -> list[str]:
    """Return a selection as texts, one an item, for manifests and messages.

    Texts, patterns and classes can be given back to :func:`resolve` (a class by its name); of a module or a predicate
    only its name is kept, in angle brackets. An iterator is used up.
    """
    return [item.text for item in _items(selection, ())]


def _items(selection: Any, entries: Sequence[Entry]) -> Iterator[_Item]:
    if selection is None:
        yield _Item("**", False, "**")
    elif isinstance(selection, str):
        yield from _text_items(selection)
    elif isinstance(selection, type):
        yield _Item(f"type:{selection.__name__}", False, selection)
    elif isinstance(selection, re.Pattern):
        yield _pattern_item(selection)
    elif _is_module(selection, entries):
        yield _Item(f"<module {type(selection).__name__}>", False, selection)
    elif isinstance(selection, Iterable) and not isinstance(selection, (bytes, dict)) and not callable(selection):
        for part in selection:
            yield from _items(part, entries)
    elif callable(selection):
        name = getattr(selection, "__qualname__", type(selection).__qualname__)
        yield _Item(f"<{'module' if isinstance(selection, Iterable) else 'predicate'} {name}>", False, selection)
    else:
        raise SelectionError(
            f"cannot select by {selection!r} ({type(selection).__name__}); use a text, a class, a compiled regular "
            f"expression, a module, a function (path, module) -> bool, or a list of these"
        )


def _pattern_item(pattern: re.Pattern[Any]) -> _Item:
    if not isinstance(pattern.pattern, str):
        raise SelectionError(
            f"cannot select by {pattern!r}: paths are text, so compile the pattern from str, not bytes"
        )
    flags = "".join(letter for letter in "imsxa" if pattern.flags & re.RegexFlag[letter.upper()])
    return _Item(f"re:{f'(?{flags})' if flags else ''}{pattern.pattern}", False, pattern)


def _is_module(value: object, entries: Sequence[Entry]) -> bool:
    """Tell a module from a predicate or a list: torch's modules are callable, and ``Sequential`` is iterable too."""
    if any(entry.module is value for entry in entries):
        return True
    if not callable(value) or not entries:
        return False
    shared = set(type(entries[0].module).__mro__)
    for cls in {type(entry.module) for entry in entries}:
        shared.intersection_update(cls.__mro__)
    frameworks = tuple(cls for cls in shared if cls.__module__ not in ("builtins", "abc", "typing"))
    return isinstance(value, frameworks)


def _text_items(text: str) -> Iterator[_Item]:
    position = 0
    while True:
        end = _item_end(text, position)
        raw = text[position:end]
        written = raw.strip()
        exclude = written.startswith("!")
        value = written[1:].lstrip() if exclude else written
        if not value and (exclude or text.strip()):
            raise SelectionError(
                f"cannot read selection {text!r} at position {position}: an item is empty; the root is written {ROOT}, "
                f"for example 'features.*,!features.0'"
            )
        if value.startswith("!"):
            raise SelectionError(f"cannot read selection {text!r} at position {position}: one '!' is enough")
        yield _Item(written or ROOT, exclude, value or ROOT)
        if end == len(text):
            return
        position = end + 1


def _item_end(text: str, start: int) -> int:
    if re.compile(r"\s*!?\s*re:").match(text, start):
        return len(text)
    position = start
    while position < len(text) and text[position] != ",":
        # A comma may be a member of a class in brackets.
        position = max(position, class_end(text, position)) + 1
    return position


def _match(item: _Item, entries: Sequence[Entry]) -> tuple[list[int], bool]:
    """Return the positions of the entries that an item matches, and whether it names exactly one."""
    value = item.value
    if isinstance(value, str):
        return _match_text(item, value, entries)
    if isinstance(value, re.Pattern):
        return _match_names(value.fullmatch, entries), False
    if isinstance(value, type):
        return [index for index, entry in enumerate(entries) if isinstance(entry.module, value)], False
    same = [index for index, entry in enumerate(entries) if entry.module is value]
    if same or _is_module(value, entries):
        return same, True
    return [index for index, entry in enumerate(entries) if _ask(value, entry)], False


def _match_text(item: _Item, text: str, entries: Sequence[Entry]) -> tuple[list[int], bool]:
    if text.startswith("re:"):
        return _match_names(_regex(text).fullmatch, entries), False
    if text.startswith("type:"):
        return _match_types(text, entries), False
    name = "" if text == ROOT else text
    for names in (lambda e: (e.path,), lambda e: e.aliases, lambda e: (e.raw_path,) if e.raw_path else ()):
        found = [index for index, entry in enumerate(entries) if name in names(entry)]
        if found:
            return found, True
    if GLOB_SIGNS.isdisjoint(text):
        return [], True
    return _match_names(glob_pattern(text, item.text).fullmatch, entries), False


def _match_names(matches: Callable[[str], object], entries: Sequence[Entry]) -> list[int]:
    found = [
        index
        for index, entry in enumerate(entries)
        if matches(entry.path) or (entry.aliases and any(matches(alias) for alias in entry.aliases))
    ]
    return found or [index for index, entry in enumerate(entries) if entry.raw_path and matches(entry.raw_path)]


def _match_types(text: str, entries: Sequence[Entry]) -> list[int]:
    wanted = text[len("type:") :].strip()
    if not wanted:
        raise SelectionError(f"cannot read selection {text!r}: expected the name of a class, for example 'type:Conv2d'")
    matches = glob_pattern(wanted, text).fullmatch
    known: dict[tuple[str, ...], bool] = {}
    found: list[int] = []
    for index, entry in enumerate(entries):
        names = entry.type_names or tuple(cls.__name__ for cls in type(entry.module).__mro__)
        if names not in known:
            known[names] = any(matches(name) for name in names if name != "object")
        if known[names]:
            found.append(index)
    return found


def _ask(predicate: Predicate, entry: Entry) -> bool:
    try:
        return bool(predicate(entry.path, entry.module))
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(  # pyright: ignore[reportAttributeAccessIssue]
                f"raised by the predicate of a selection, called with (path, module) for {entry.path or ROOT!r}"
            )
        raise


def _regex(text: str) -> re.Pattern[str]:
    pattern = text[len("re:") :]
    try:
        return re.compile(pattern)
    except re.error as error:
        at = 0 if error.pos is None else error.pos
        raise SelectionError(
            f"cannot read the regular expression {pattern!r} at position {at}: {error.msg}\n"
            f"  it must match the whole path, for example 're:h\\.\\d+\\.mlp'; it takes the rest of the text"
        ) from None


def _nothing(item: _Item, entries: Sequence[Entry], what: str, parameters: Collection[str]) -> SelectionError:
    first = f"no {what} matches {item.text!r} ({len(entries)} known)"
    if isinstance(item.value, str):
        hint = parameter_hint(item.value, parameters, _glob_or_none)
        lines = hint or [*_kind_hint(item.value), *nearest(item.value, entries, what, _glob_or_none)]
    elif isinstance(item.value, re.Pattern):
        lines = ["a regular expression must match the whole path; put '.*' where anything may stand"]
    elif isinstance(item.value, type):
        lines = nearest(item.text, entries, what, _glob_or_none)
    elif _is_module(item.value, entries):
        lines = ["this object is not part of the model; was it replaced or copied?"]
    else:
        lines = ["the predicate was false for each; it is called with (path, module)"]
    return SelectionError("\n  ".join([first, *lines]))


def _kind_hint(text: str) -> list[str]:
    """Return the line for a text that ends in the kind of an address, ``features.0:output``; none for any other."""
    kind = re.match("[a-z_]*", text.rpartition(":")[2])
    if ":" not in text or kind is None or kind[0] not in [one.value for one in Kind]:
        return []
    return [
        f"':{kind[0]}' is a part of an address in a recording; here a module is selected, and not what of it is meant"
    ]


def _glob_or_none(text: str) -> Callable[[str], object] | None:
    try:
        return glob_pattern(text).fullmatch
    except SelectionError:
        return None


def _never_called(item: _Item, never: Sequence[Entry], entries: Sequence[Entry]) -> SelectionError:
    entry = never[0]
    kind = entry.type_names[0] if entry.type_names else type(entry.module).__name__
    inside = f"{entry.path}.*" if entry.path else "*"
    has_inside = any(
        other.path.startswith(f"{entry.path}." if entry.path else "") for other in entries if other != entry
    )
    what_now = f"select what is in it: {inside!r}" if has_inside else "it has no modules in it"
    return SelectionError(
        f"{item.text!r} names {entry.path or ROOT!r}, a container ({kind}) that is never called, so a hook on it would "
        f"never fire\n  {what_now}"
    )
