"""What the statistics of a recording say of its numbers: whether they are finite, where not, and what passes nothing on."""

from __future__ import annotations

from dataclasses import dataclass

from tenterhook.analysis.nonfinite import NOT_FINITE, FirstNonfinite, Nonfinite, find_nonfinite
from tenterhook.analysis.stuck import Stuck, find_stuck
from tenterhook.recording import Recording

__all__ = ["Numbers", "numbers_of"]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What is known of the numbers of a recording.

    Attributes:
        values: number of tensors seen.
        unmeasured: how many of them have no statistics, so that nothing is known of their numbers.
        nonfinite: how many hold NaN or an infinity, as far as they were measured; None where none was.
        masks: how many of these are masks: their -inf are meant.
        first_nonfinite: the first that is no mask, and where it may have come from.
        first_born: the first with a NaN or +inf, where that is another.
        first_mask: the first that is a mask.
        stuck: activations that gave only zeros, or only the ends of their range.
    """

    values: int
    unmeasured: int
    nonfinite: int | None
    masks: int
    first_nonfinite: FirstNonfinite | None
    first_born: FirstNonfinite | None
    first_mask: FirstNonfinite | None
    stuck: list[Stuck]


_CAME = "dtype is distinct from 'none'"
"""Of what never came, such as a gradient, there is nothing to measure."""
_UNKNOWN = f"({_CAME} and (nan_count is null or posinf_count is null or neginf_count is null))"


def numbers_of(recording: Recording) -> Numbers:
    """Look through the statistics of a recording.

    Raises:
        RecordingError: a file is damaged.
    """
    [values] = recording.query(
        f"select count(*) n, count(*) filter ({_CAME}) came, count(*) filter ({_UNKNOWN}) unknown, "
        f"count(*) filter ({NOT_FINITE}) bad from values"
    ).to_pylist()
    several = len(recording.models) > 1
    odd = find_nonfinite(recording, several=several) if values["bad"] else Nonfinite(None, None, 0, None)
    return Numbers(
        values=values["n"],
        unmeasured=values["unknown"],
        nonfinite=None if 0 < values["came"] == values["unknown"] and not values["bad"] else values["bad"],
        masks=odd.masks,
        first_nonfinite=odd.first,
        first_born=odd.first_born,
        first_mask=odd.first_mask,
        stuck=find_stuck(recording, several=several),
    )
