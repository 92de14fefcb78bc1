"""Which steps of a run are recorded."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from tenterhook.errors import TenterhookError

__all__ = ["Sampling"]

_HOW = "write steps as 0:100:10,500, or give numbers"
_ENDLESS = 2**62
_MOST_TRIED = 100_000


class Sampling:
    """Which steps are recorded.

    Args:
        every: every n-th step; or patterns and the n of the modules that each matches, a later one overruling.
        steps: these steps only: numbers, a range or a slice-like text ``"0:100:10,500"``.

    Raises:
        TenterhookError: one of them is no such thing, or no step at all fits.
    """

    def __init__(self, every: int | Mapping[str, int] = 1, steps: Iterable[int] | str | None = None) -> None:
        self.by_pattern = isinstance(every, Mapping)
        given = every if isinstance(every, Mapping) else {"": every}
        self.rates = {pattern: _rate(every, rate) for pattern, rate in given.items()}
        if not self.rates:
            raise TenterhookError("every={} names no module\n  give a number, or patterns with a number each")
        self._rates = set(self.rates.values())
        self._steps = None if steps is None else _parts(steps)
        self._ordered = [_in_order(part) for part in self._steps or ()]
        if self._steps is not None and not any(_fits(part, rate) for part in self._steps for rate in self._rates):
            raise TenterhookError(
                f"steps={steps!r} with every={every!r} records nothing: no step fits both\n  leave one of the two out"
            )

    @property
    def always(self) -> bool:
        """Whether each step is recorded, in whole."""
        return self._steps is None and self._rates == {1}

    @property
    def asked(self) -> dict[str, Any]:
        """What was asked for, as plain data."""
        every = self.rates if self.by_pattern else next(iter(self.rates.values()))
        steps = None if self._steps is None else ",".join(text for part in self._steps for text in _texts(part))
        return {"every": every, "steps": steps}

    def wants(self, step: int) -> bool:
        """Whether this step is to be recorded."""
        if self._steps is not None and not any(step in part for part in self._steps):
            return False
        for every in self._rates:
            if step % every == 0:
                return True
        return False

    def earliest(self, step: int) -> int:
        """Return a step, this one or a later one, before which none is to be recorded; not always one that is."""
        by_rate = min([step + -step % every for every in self._rates])
        if self._steps is None:
            return by_rate
        return max(by_rate, min(_earliest(part, step) for part in self._ordered))

    def fits(self, step: int) -> frozenset[int]:
        """Return those of the rates that divide the number of a step."""
        return frozenset(every for every in self._rates if step % every == 0)

    def use(self, rates: Iterable[int]) -> None:
        """Tell which rates the modules have, where patterns say so."""
        self._rates = set(rates)


def _in_order(part: Collection[int]) -> Sequence[int]:
    if isinstance(part, range):
        return part if part.step > 0 else part[::-1]
    return sorted(part)


def _earliest(part: Sequence[int], step: int) -> int:
    at = bisect_left(part, step)
    return part[at] if at < len(part) else _ENDLESS


def _texts(part: Collection[int]) -> list[str]:
    if isinstance(part, range):
        if len(part) == 1:
            return [str(part[0])]
        return [f"{part.start}:{'' if part.stop == _ENDLESS else part.stop}:{part.step}"]
    return [str(step) for step in sorted(part)]


def _rate(every: object, rate: object) -> int:
    number = _number(rate)
    if number is None:
        raise TenterhookError(
            f"every={every!r}: {rate!r} is no whole number\n  use 1 for each step, 10 for every tenth"
        )
    if number < 1:
        raise TenterhookError(f"every={every!r} records nothing\n  use 1 for each step, 10 for every tenth")
    return number


def _number(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _fits(part: Collection[int], rate: int) -> bool:
    # Of a range the remainders repeat after as many numbers as the rate has.
    return rate > _MOST_TRIED or any(step % rate == 0 for step in islice(part, None if isinstance(part, set) else rate))


def _parts(steps: Iterable[int] | str) -> Sequence[Collection[int]]:
    if isinstance(steps, str):
        return [_part(steps, item) for item in steps.split(",")]
    if isinstance(steps, range):
        named: Collection[int] = steps
    else:
        try:
            named = {_step(steps, step) for step in steps}
        except TypeError:
            raise TenterhookError(f"steps={steps!r} is neither text nor a list of numbers\n  {_HOW}") from None
    if not named:
        raise TenterhookError(f"steps={steps!r} names no step, so nothing would be recorded\n  {_HOW}")
    if min(named) < 0:
        raise TenterhookError(f"steps={steps!r} counts from the end, which is not known\n  steps are numbered from 0")
    return [named]


def _step(steps: object, step: object) -> int:
    number = _number(step)
    if number is None:
        raise TenterhookError(f"steps={steps!r}: {step!r} is no whole number\n  {_HOW}")
    return number


def _part(steps: str, item: str) -> range:
    try:
        numbers = [int(number) if number.strip() else None for number in item.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or numbers == [None]:
        raise TenterhookError(f"steps={steps!r} is not understood at {item!r}\n  {_HOW}")
    if any(number is not None and number < 0 for number in numbers):
        raise TenterhookError(
            f"steps={steps!r} counts from the end at {item!r}, which is not known\n  steps are numbered from 0"
        )
    if len(numbers) == 1:
        first = numbers[0] or 0
        return range(first, first + 1)
    start, stop, stride = (*numbers, None)[:3]
    if stride == 0:
        raise TenterhookError(f"steps={steps!r} has a stride of 0 at {item!r}\n  {_HOW}")
    part = range(start or 0, _ENDLESS if stop is None else stop, stride or 1)
    if not part:
        raise TenterhookError(
            f"steps={steps!r} names no step at {item!r}\n  the second number is where it ends, not included"
        )
    return part
