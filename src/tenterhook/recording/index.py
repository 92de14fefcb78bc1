"""The calls and values of one module, which grow with the recording: each row is read and turned into an object once."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, overload

from tenterhook.recording.call import Call, Lookup, call_from_row
from tenterhook.recording.source import Module, Source
from tenterhook.recording.value import Value, value_from_row

__all__ = ["CallList", "ModuleIndex"]


class CallList(Sequence[Call]):
    """Calls in execution order, read-only. It grows when the recording is asked again and has got more."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | list[Call]:
        return self._calls[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, CallList)) and self._calls == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._calls)


def _call_order(call: Call) -> tuple[int, int]:
    return call.rank, call.seq


class ModuleIndex:
    """What a recording knows of one module.

    Args:
        module: the names of the outermost module and of the module in it.
        source: where rows come from.
        lookup: what the calls ask later.
    """

    def __init__(self, module: Module, source: Source, lookup: Lookup) -> None:
        self._module = module
        self._source = source
        self._lookup = lookup
        self._calls_mark: Any = None
        self._values_mark: Any = None
        self._versions = {"calls": -1, "values": -1}
        self._all: list[Call] = []
        self._of_phase: defaultdict[str, list[Call]] = defaultdict(list)
        self._of_step: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
        self._related: defaultdict[tuple[int, int], list[Call]] = defaultdict(list)
        self._by_seq: dict[tuple[int, int], Call] = {}
        self._values: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
        self._loose: defaultdict[str, defaultdict[int, list[Value]]] = defaultdict(lambda: defaultdict(list))

    def calls(self, phase: str | None = None, step: int | None = None) -> CallList:
        """Give the calls of a phase, or of a phase in a step; all of them without either."""
        self._read_calls()
        if phase is None:
            return CallList(self._all)
        return CallList(self._of_phase[phase] if step is None else self._of_step[phase, step])

    def related(self, call: Call) -> list[Call]:
        """Give the backward calls of a forward call, or the forward call of another."""
        self._read_calls()
        if call.phase == "forward":
            return list(self._related.get((call.rank, call.seq), ()))
        found = None if call.forward is None else self._by_seq.get((call.rank, call.forward))
        return [] if found is None else [found]

    def values(self, call: Call) -> list[Value]:
        """Give the values that belong to a row of calls, in the order in which they were seen."""
        self._read_values()
        return list(self._values.get((call.rank, call.seq), ()))

    def loose(self, kind: str) -> dict[int, list[Value]]:
        """Give the values of a kind that belong to no call, those of parameters: step -> values."""
        self._read_values()
        return self._loose.get(kind, {})

    def _read_calls(self) -> None:
        for row in self._fresh("calls"):
            call = call_from_row(row, self._lookup)
            places = [self._all, self._of_phase[call.phase], self._of_step[call.phase, call.step]]
            if call.phase == "backward" and call.forward is not None:
                places.append(self._related[call.rank, call.forward])
            for calls in places:
                # A row is written when its call ends, so of nested calls the outer one comes later.
                bisect.insort(calls, call, key=_call_order)
            if call.phase == "forward":
                self._by_seq[call.rank, call.seq] = call

    def _read_values(self) -> None:
        for row in self._fresh("values"):
            value = value_from_row(row, self._source)
            owner = (
                self._loose[value.kind][value.step]
                if value.call_seq is None
                else self._values[value.rank, value.call_seq]
            )
            bisect.insort(owner, value, key=lambda one: (one.rank, one.seq))

    def _fresh(self, table: str) -> list[dict[str, Any]]:
        version = self._source.version
        if version == self._versions[table]:
            return []
        self._versions[table] = version
        name = f"_{table}_mark"
        rows, mark = self._source.module_rows(table, self._module, getattr(self, name))
        setattr(self, name, mark)
        return rows.to_pylist()
