"""What is meant by the text in `recording["..."]`: a module, a module in one call or step, or one value."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from tenterhook.address import Address, Kind, format_place, parse_address
from tenterhook.errors import NotRecordedError, SelectionError
from tenterhook.recording.call import Lookup
from tenterhook.recording.view import ModuleView

__all__ = ["look_up"]


def look_up(
    text: object, models: Sequence[str], paths: Collection[tuple[str, str]], lookup: Lookup
) -> ModuleView | Any:
    """Find what a text names.

    Args:
        text: a place (`conv1`, `Net/conv1`, `(root)/relu`), a call of it (`conv1#0@3`), or an address with its kind
            (`lstm:output[1]#0@3`), as they are printed.
        models: the models that are known, the one that a bare path means first.
        paths: (model, path) of every module that is known, quick to search.
        lookup: what the answer asks later.

    Returns:
        A view of the module, narrowed to the call and step that were named; with a kind, the value.

    Raises:
        NotRecordedError: there is no such module, or no such value; the nearest names are listed.
        AmbiguousError: several values are called so.
        SelectionError: the address is malformed.
    """
    if not isinstance(text, str):
        raise NotRecordedError(
            f"a recording is asked by the path of a module, recording['features.0'], not by {type(text).__name__} "
            f"{text!r:.40}; its calls in order are recording.order()"
        )
    view = _place(text, models, paths, lookup)
    if view is not None:
        return view
    if not any(sign in text for sign in ":#@"):
        raise NotRecordedError(_unknown(text, models, paths))
    address, kind = _parsed(text, models)
    path = format_place(address.path, op=address.op) if address.op else address.path
    place = path if address.model is None else f"{address.model}/{path}"
    view = _place(place, models, paths, lookup)
    if view is None:
        raise NotRecordedError(_unknown(place, models, paths))
    view = view.at(step=address.step, call=address.call)
    return view if kind is None else view.value(kind, address.slot)


def _parsed(text: str, models: Sequence[str]) -> tuple[Address, str | None]:
    try:
        address = parse_address(text, models=models)
    except SelectionError:
        # Only the kind may be left out; that of an op is then left open, too.
        return parse_address(text, kind=Kind.OUTPUT, models=models), None
    explicit = f":{address.kind}" in text
    return address, address.kind.value if explicit else None


def _place(text: str, models: Sequence[str], paths: Collection[tuple[str, str]], lookup: Lookup) -> ModuleView | None:
    wanted = text.removesuffix("(root)")
    model, slash, rest = wanted.partition("/")
    if slash and (model, rest) in paths:
        return ModuleView(model, rest, lookup)
    having = [name for name in models if (name, wanted) in paths]
    if having:
        return ModuleView(having[0], wanted, lookup)
    return ModuleView(wanted, "", lookup) if wanted in models else None


def _unknown(path: str, models: Sequence[str], paths: Collection[tuple[str, str]]) -> str:
    names = [f"{model}/{name or '(root)'}" if len(models) > 1 else name or "(root)" for model, name in paths]
    spelled = dict(zip(names, paths, strict=True))
    for model, name in paths:  # bare, which means the first model that has it
        spelled.setdefault(name or "(root)", (model, name))
    close: dict[tuple[str, str], str] = {}  # each module once, by the likest of its spellings
    for text in difflib.get_close_matches(path, list(spelled), n=10, cutoff=0.5):
        close.setdefault(spelled[text], text)
    if close:
        near = list(close.values())[:5]
        return f"no module {path!r} is in this recording; the nearest are {', '.join(near)}"
    if not names:
        return f"no module {path!r} is in this recording: it holds no calls"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"no module {path!r} is in this recording; it has {', '.join(names[:5])}{more}"
