"""Activations that pass nothing on: dead ones, which give zeros alone, and saturated ones, as far as basic statistics tell."""

from __future__ import annotations

from dataclasses import dataclass

from tenterhook.address import format_place, split_op
from tenterhook.recording import Recording

__all__ = ["Stuck", "find_stuck"]

_CLAMPS = ("Hardshrink", "Hardswish", "ReLU", "ReLU6", "Softshrink", "Threshold")
_CLAMPING = ("hardshrink", "hardswish", "relu", "relu6", "relu_", "softshrink", "threshold", "threshold_")
_ENDS = {"Sigmoid": "0 or 1", "Tanh": "-1 or 1"}
_NEAR = 1e-3


@dataclass(frozen=True)
class Stuck:
    """An activation that was stuck in every call that was recorded.

    Attributes:
        place: its module or function.
        type: its class; empty for a function.
        gives: what it gives alone: ``zeros``, ``values near 0 or 1``.
        calls: how many calls were looked at.
    """

    place: str
    type: str
    gives: str
    calls: int


def find_stuck(recording: Recording, *, several: bool) -> list[Stuck]:
    """Find activations whose outputs were all zeros, or all at the ends of their range, in every call, in the order in which they ran.

    Only modules and functions that are made to let something through are looked at: zeros of a layer that starts at zero are meant.

    Args:
        recording: where to look.
        several: whether places are told with their model.
    """
    # Of x between 0 and 1 the mean of x (1 - x) is mean - rms², of x between -1 and 1 that of 1 - x² is 1 - rms²: 0 at the ends.
    rows = recording.query(
        f"""
        select c.model, c.path, c.type, count(*) n, bool_and(coalesce(v.zero_count = v.numel, false)) zeros,
            bool_and(coalesce(case c.type when 'Sigmoid' then v.mean - v.rms * v.rms else 1 - v.rms * v.rms end < {_NEAR}, false)
                ) ends
        from values v join calls c on v.call_seq = c.seq and v.rank = c.rank
        where v.kind = 'output' and c.phase = 'forward' and v.numel > 0
            and (c.type in {(*_CLAMPS, *_ENDS)} or (c.type = 'op' and regexp_extract(c.path, '[^/]+$') in {_CLAMPING}))
        group by c.model, c.path, c.type having zeros or (ends and c.type in {tuple(_ENDS)})
        order by min(v.rank), min(v.seq)
        """
    ).to_pylist()
    found = []
    for row in rows:
        path, op = split_op(row["path"] or "") if row["type"] == "op" else (row["path"] or "", "")
        gives = "zeros" if row["zeros"] else f"values near {_ENDS[row['type']]}"
        place = format_place(path, op=op, model=row["model"] if several else None)
        found.append(Stuck(place, "" if op else row["type"], gives, row["n"]))
    return found
