"""Which steps of a run are recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tenterhook.errors import TenterhookError

__all__ = ["Sampling"]


class Sampling:
    """Which steps are recorded.

    Args:
        every: every n-th step; or patterns and the n of the modules that each matches, a later one overruling.
        steps: these steps only: numbers, a range or a slice-like text ``"0:100:10,500"``.
    """

    def __init__(self, every: int | Mapping[str, int] = 1, steps: Iterable[int] | str | None = None) -> None:
        self.rates = dict(every) if isinstance(every, Mapping) else {"": every}
        if not self.rates or min(self.rates.values()) < 1:
            raise TenterhookError(f"every={every} records nothing\n  use 1 for each step, 10 for every tenth")
        self.by_pattern = isinstance(every, Mapping)
        self._rates = set(self.rates.values())
        self._steps = None if steps is None else self._parse(steps)

    def wants(self, step: int) -> bool:
        """Whether this step is to be recorded."""
        if self._steps is not None and not any(step in part for part in self._steps):
            return False
        return any(step % every == 0 for every in self._rates)

    def use(self, rates: Iterable[int]) -> None:
        """Tell which rates the modules have, where patterns say so."""
        self._rates = set(rates)

    @staticmethod
    def _parse(steps: Iterable[int] | str) -> list[Collection[int]]:
        if isinstance(steps, range):
            return [steps]
        if not isinstance(steps, str):
            return [frozenset(int(step) for step in steps)]
        parts: list[Collection[int]] = []
        for item in steps.split(","):
            try:
                numbers = [int(number) if number.strip() else None for number in item.split(":")]
                if len(numbers) == 1 and numbers[0] is not None:
                    parts.append(range(numbers[0], numbers[0] + 1))
                    continue
                start, stop, stride = (*numbers, None, None)[:3]
                parts.append(range(start or 0, 2**62 if stop is None else stop, stride or 1))
            except ValueError:
                raise TenterhookError(
                    f"steps={steps!r} is not understood at {item!r}\n  write steps as 0:100:10,500"
                ) from None
        return parts
