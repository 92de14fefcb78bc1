"""All stored tensors of one kind of one module: as they were stored, or sample by sample."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tenterhook.errors import NotRecordedError
from tenterhook.recording import converters
from tenterhook.recording.value import TensorSource

__all__ = ["Place", "Samples", "TensorSequence"]


class Place(NamedTuple):
    """Where a tensor is.

    Attributes:
        key: its key.
        rank: the process that stored it.
        step: its step.
        shape: its shape; of a shard, the whole's.
    """

    key: str
    rank: int
    step: int
    shape: list[int] | None


class TensorSequence(Sequence[Any]):
    """All tensors of one kind of one module, over steps and calls, each read only when asked for.

    From a file they are memory-mapped: an item costs no memory until its elements are looked at, and can be written to,
    which changes no file. It has what PyTorch asks of a map-style ``Dataset``, pickles into the workers of a ``DataLoader``,
    and opens the files there anew.
    """

    def __init__(self, places: Sequence[Place], store: TensorSource, framework: str | None = None) -> None:
        self._places = places
        self._store = store
        self._framework = framework

    @property
    def steps(self) -> list[int]:
        """The step of each."""
        return [place.step for place in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return TensorSequence(self._places[index], self._store, self._framework)
        if not -len(self) <= operator.index(index) < len(self):
            raise IndexError(f"tensor {index} of {len(self)}")
        return self._given(self._stored(self._places[index]))

    def sample(self, index: int, at: int) -> Any:
        """Give one item along the first dimension of a tensor, reading no other; from a file, in memory of its own."""
        item = self._stored(self._places[index], own=False)[at]
        return self._given(
            item.copy() if isinstance(item, np.ndarray | np.generic) and self._framework is None else item
        )

    def _stored(self, place: Place, *, own: bool = True) -> Any:
        return self._store.tensor(place.key, place.rank, own=own)

    def _given(self, tensor: Any) -> Any:
        return (
            tensor if self._framework is None else converters.from_numpy(converters.to_numpy(tensor), self._framework)
        )

    def as_torch(self) -> TensorSequence:
        """Give the same with torch tensors for items, each in memory of its own.

        Raises:
            MissingExtraError: when an item is asked for, and torch is not installed.
        """
        return TensorSequence(self._places, self._store, "torch")

    def samples(self) -> Samples:
        """Give the samples one by one: what was stored batch by batch, along the first dimension.

        Raises:
            NotRecordedError: a tensor has no dimension.
        """
        return Samples(self)

    @property
    def places(self) -> Sequence[Place]:
        """Where each is."""
        return self._places

    def __repr__(self) -> str:
        span = f", steps {self._places[0].step} to {self._places[-1].step}" if self._places else ""
        return f"{len(self)} tensors{span}"


class Samples(Sequence[Any]):
    """The items along the first dimension of all tensors of a sequence: a map-style ``Dataset`` of samples."""

    def __init__(self, batches: TensorSequence) -> None:
        self._batches = batches
        shapes = [place.shape for place in batches.places]
        if not all(shapes):
            raise NotRecordedError("these tensors are single numbers, which have no samples; index them as they are")
        self._ends = list(itertools.accumulate(shape[0] for shape in shapes if shape))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = bisect.bisect_right(self._ends, at)
        return self._batches.sample(batch, at - (self._ends[batch - 1] if batch else 0))

    def __repr__(self) -> str:
        return f"{len(self)} samples in {self._batches!r}"
