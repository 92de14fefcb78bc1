"""What somebody may have meant whose selection matches nothing."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

__all__ = ["nearest", "parameter_hint"]

_MOST = 5
_MOST_TRIED = 64
_Compile = Callable[[str], "Callable[[str], object] | None"]


class _Named(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def type_names(self) -> tuple[str, ...]: ...


def parameter_hint(text: str, parameters: Collection[str], compile_glob: _Compile) -> list[str]:
    """Return lines for a text that names parameters, none if it does not."""
    matches = compile_glob(text)
    if matches is None:
        return []
    found = [name for name in parameters if name == text or matches(name)]
    if not found:
        return []
    names = "the name of a parameter" if len(found) == 1 else f"the name of {len(found)} parameters"
    return [f"it is {names}, such as {found[0]!r}; for gradients of parameters use param_grad({text!r}, ...)"]


def nearest(text: str, entries: Sequence[_Named], what: str, compile_glob: _Compile) -> list[str]:
    """Return the line that lists up to five nearest names or patterns, each of which matches something."""
    if text.startswith("re:"):
        return ["a regular expression must match the whole path; put '.*' where anything may stand"]
    if text.startswith("type:"):
        return _nearest_types(text[len("type:") :].strip(), entries)
    paths = list(dict.fromkeys(entry.path for entry in entries if entry.path))  # several models may have the same
    before = text.partition(":")[0] if ":" in text else ""
    tried = [before] if before else []
    above = text  # nothing is below a module that holds no others
    while above.rpartition(".")[2] in ("*", "**"):
        above = above.rpartition(".")[0]
    tried += [above] if above in paths else []
    if what == "parameter":  # a module stands for its parameters
        tried += [f"{text}.*", *_corrected(f"{text}.*", paths)]
    tried += [*_corrected(text, paths), *_other_prefix(text, paths)]
    counted: dict[str, int] = {}
    for candidate in tried[:_MOST_TRIED]:
        matches = compile_glob(candidate)
        if candidate == text or candidate in counted or matches is None:
            continue
        count = sum(1 for path in paths if path == candidate or matches(path))
        if count:
            counted[candidate] = count
        if len(counted) == _MOST:
            break
    if not any(sign in text for sign in "*?["):
        for path in _similar(text, paths):
            counted.setdefault(path, 1)
    shown = [
        repr(candidate) + (f" ({count} {what}s)" if count > 1 else "")
        for candidate, count in itertools.islice(counted.items(), _MOST)
    ]
    return [f"nearest: {', '.join(shown)}"] if shown else [f"known are {_some(paths)}"]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none but the root"
    return ", ".join(repr(name) for name in names[:_MOST]) + (", ..." if len(names) > _MOST else "")


def _corrected(text: str, paths: Sequence[str]) -> list[str]:
    """Replace each level that no path has by the levels most like it, and try all combinations."""
    known = dict.fromkeys(level for path in paths for level in path.split("."))
    choices = []
    for level in text.split("."):
        if level in known or any(sign in level for sign in "*?["):
            choices.append([level])
        else:
            choices.append(_alike(level, list(known)) or [level])
    return [".".join(combination) for combination in itertools.islice(itertools.product(*choices), _MOST_TRIED)]


def _alike(level: str, known: Sequence[str]) -> list[str]:
    if level.isdecimal():
        numbers = sorted((name for name in known if name.isdecimal()), key=lambda name: abs(int(name) - int(level)))
        return numbers[:3]
    folded = level.lower()
    same = [
        name for name in known if name.lower() == folded or name.lower() in (f"{folded}s", folded.removesuffix("s"))
    ]
    return list(dict.fromkeys([*same, *difflib.get_close_matches(level, known, n=3, cutoff=0.6)]))


def _other_prefix(text: str, paths: Sequence[str]) -> list[str]:
    """Try the text below other modules, and without its first levels."""
    levels = text.split(".")
    shorter = [".".join(levels[at:]) for at in range(1, len(levels))]
    longer = [path for path in paths if path.endswith(f".{text}")]
    return [*longer[:_MOST], *(() if levels[0] == "**" else (f"**.{text}",)), *shorter]


def _similar(text: str, paths: Sequence[str]) -> list[str]:
    """Return the paths most like a text: those that share its beginning first, then by likeness."""
    parent = text
    while parent := parent.rpartition(".")[0]:
        siblings = [path for path in paths if path.startswith(f"{parent}.")]
        if siblings:
            level = parent.count(".") + 1
            same_depth = [path for path in siblings if path.count(".") == level] or siblings
            last = text[len(parent) + 1 :].partition(".")[0]
            if last.isdecimal():
                numbered = [path for path in same_depth if path.rpartition(".")[2].isdecimal()]
                return sorted(numbered, key=lambda path: abs(int(path.rpartition(".")[2]) - int(last)))[:_MOST]
            return difflib.get_close_matches(text, same_depth, n=_MOST, cutoff=0.3) or same_depth[:_MOST]
    return difflib.get_close_matches(text, paths, n=_MOST, cutoff=0.5)


def _nearest_types(wanted: str, entries: Sequence[_Named]) -> list[str]:
    counts: dict[str, int] = {}
    for entry in entries:
        for name in entry.type_names[:1] or (type(getattr(entry, "module", entry)).__name__,):
            counts[name] = counts.get(name, 0) + 1
    close = _alike(wanted, list(counts))[:_MOST]
    shown = close or sorted(counts, key=lambda name: -counts[name])[:_MOST]
    listed = ", ".join(f"'type:{name}' ({counts[name]})" for name in shown)
    return [f"{'nearest' if close else 'types known'}: {listed}"] if listed else ["no types are known"]
