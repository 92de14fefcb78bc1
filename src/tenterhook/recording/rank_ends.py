"""What is said of ranks that have no end: those that were never closed, and those whose folders are not there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tenterhook.errors import RecordingError
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.target import reached, writer_of

__all__ = ["chosen", "missing", "named", "told_of_unclosed", "unclosed"]

_SHOWN = 6


def chosen(ranks: Sequence[int] | int | None) -> list[int] | None:
    """Read which ranks are asked for; None for all.

    Raises:
        RecordingError: none are, or something that is no rank.
    """
    if ranks is None:
        return None
    how = "ranks=[0, 3] reads these only, ranks=None all"
    try:
        found = [operator.index(one) for one in ranks] if isinstance(ranks, Iterable) else [operator.index(ranks)]
    except TypeError:
        raise RecordingError(f"ranks={ranks!r:.40} are no numbers of ranks; {how}") from None
    if not found:
        raise RecordingError(f"ranks={ranks!r:.40} asks for no rank; {how}")
    return found


def named(ranks: Iterable[int]) -> str:
    """Write ranks shortly: `rank 3`, `ranks 3, 7 to 9`."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank:
            spans[-1] = spans[-1][0], rank + 1
        else:
            spans.append((rank, rank + 1))
    return _spelled(spans)


def missing(world: int, there: Iterable[int]) -> str | None:
    """Say which of `world` ranks are not there: `ranks 3, 7 to 9 of 16 are missing`; None where all are."""
    spans: list[tuple[int, int]] = []
    begin = 0
    for rank in sorted(set(there)):
        if begin < min(rank, world):
            spans.append((begin, min(rank, world)))
        begin = rank + 1
    if begin < world:
        spans.append((begin, world))
    if not spans:
        return None
    return f"{_spelled(spans)} of {world} {'is' if _size(spans) == 1 else 'are'} missing"


def unclosed(manifests: Sequence[Manifest], folders: Mapping[int, Path]) -> dict[int, str]:
    """Say of each rank of several that was never closed, and that no process on this machine writes, how far it came.

    Args:
        manifests: the ranks' own.
        folders: their folders.

    Returns:
        rank -> words without the rank, `was never closed: killed in step 11 or soon after`.

    Raises:
        RecordingError: a file of it is damaged.
    """
    found: dict[int, str] = {}
    for manifest in manifests:
        rank = manifest.rank
        if manifest.complete or manifest.world <= 1 or rank not in folders:
            continue
        owner, alive = writer_of(folders[rank])
        if alive:
            continue
        elsewhere = f", if it does not go on on {owner:.80}" if owner else ""
        step = reached(folders[rank], rank)
        if step is None:
            found[rank] = f"was never closed and has no rows: killed before the first were written{elsewhere}"
        else:
            found[rank] = f"was never closed: killed in step {step} or soon after{elsewhere}"
    return found


def told_of_unclosed(words: Mapping[int, str]) -> list[str]:
    """Write what `unclosed` has found as sentences, ranks of which the same holds together; the first few of many."""
    by_words: dict[str, list[int]] = {}
    for rank, one in words.items():
        by_words.setdefault(one, []).append(rank)
    told = [
        f"{named(ranks)} {one if len(ranks) == 1 else _of_several(one)}"
        for one, ranks in list(by_words.items())[:_SHOWN]
    ]
    left = [rank for ranks in list(by_words.values())[_SHOWN:] for rank in ranks]
    return [*told, f"{named(left)} {'was' if len(left) == 1 else 'were'} never closed either"] if left else told


def _of_several(words: str) -> str:
    return words.replace("was never closed and has", "were never closed and have").replace("was never", "were never")


def _size(spans: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)


def _spelled(spans: Sequence[tuple[int, int]]) -> str:
    parts: list[str] = []
    for begin, end in spans[:_SHOWN]:
        parts += [f"{begin} to {end - 1}"] if end - begin > 2 else map(str, range(begin, end))
    left = _size(spans[_SHOWN:])
    more = f" and {left} more" if left else ""
    return f"{'rank' if _size(spans) == 1 else 'ranks'} {', '.join(parts)}{more}"
