"""Batches of rows as they come, and for each module which of their rows are its own: each row is looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tenterhook.recording.source import Module

__all__ = ["Buckets", "Summary"]


class Summary(NamedTuple):
    """What a finished part holds.

    Attributes:
        steps: the steps.
        modules: the modules, in the order of their first events.
    """

    steps: set[int]
    modules: list[Module]


class Buckets:
    """The rows of one table, sorted by module while they come.

    Attributes:
        rows: rows taken in, in all.
        steps: the steps that they belong to.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.steps: set[int] = set()
        self._first: dict[Module, int] = {}
        self._places: dict[Module, list[pa.RecordBatch]] = {}
        self._counts: dict[Module, list[int]] = {}  # rows up to and with each of the batches

    @property
    def modules(self) -> list[Module]:
        """The modules that have rows, in the order of their first events."""
        return sorted(self._first, key=self._first.__getitem__)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch in, of the schema `CALLS` or `VALUES`; its words may be encoded by whatever dictionaries."""
        self.rows += len(batch)
        self.steps.update(batch.column("step").unique().to_pylist())
        codes, modules = _codes(batch)
        order = np.argsort(codes, kind="stable")
        seq = batch.column("seq").to_numpy()
        edges = np.flatnonzero(np.diff(codes[order], prepend=-1, append=len(modules)))
        for start, end in pairwise(edges):
            at = order[start:end]
            module = modules[int(codes[at[0]])]
            first = int(seq[at].min())
            self._first[module] = min(first, self._first.get(module, first))
            own = batch if len(at) == len(batch) else batch.take(pa.array(at))
            self._places.setdefault(module, []).append(own)
            counts = self._counts.setdefault(module, [])
            counts.append((counts[-1] if counts else 0) + len(own))

    def after(self, module: Module, seen: int) -> list[pa.RecordBatch]:
        """Give the rows of a module but the first `seen`, in the order in which they came."""
        counts = self._counts.get(module, ())
        found: list[pa.RecordBatch] = []
        for place in range(len(counts) - 1, -1, -1):
            if counts[place] <= seen:
                break
            batch = self._places[module][place]
            found.append(batch.slice(max(0, seen - (counts[place] - len(batch)))))
        return found[::-1]


def _codes(batch: pa.RecordBatch) -> tuple[np.ndarray, Sequence[Module]]:
    """Number the modules of a batch: a number for each row, and what the numbers mean."""
    model, path = (batch.column(name) for name in ("model", "path"))
    words = [[*column.dictionary.to_pylist(), None] for column in (model, path)]
    inner = [
        column.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False).astype(np.int64)
        for column, known in zip((model, path), words, strict=True)
    ]
    both, codes = np.unique(inner[0] * len(words[1]) + inner[1], return_inverse=True)
    return codes, [(words[0][code // len(words[1])], words[1][code % len(words[1])]) for code in both]
