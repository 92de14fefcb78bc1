"""One call of one module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tenterhook.errors import AmbiguousError, NotRecordedError
from tenterhook.recording.sequences import TensorSequence
from tenterhook.recording.value import Value, gather

__all__ = ["Call", "Lookup", "call_from_row"]


class Lookup(Protocol):
    """What a call asks of its recording."""

    def calls_of(
        self, model: str | None, path: str | None, phase: str | None = None, step: int | None = None
    ) -> Sequence[Call]:
        """The calls of one module, of every phase or of one, in all steps or in one, in execution order."""
        ...

    def related(self, call: Call) -> list[Call]:
        """The backward calls of a forward call, or the forward call of another."""
        ...

    def loose_of(self, model: str | None, path: str | None, kind: str) -> dict[int, list[Value]]:
        """The values of one module that belong to no call, those of its parameters: step -> values."""
        ...

    def values_of(self, call: Call) -> list[Value]:
        """The values that belong to one row of calls."""
        ...

    def sequence(self, model: str | None, path: str | None, kind: str, slot: str | None) -> TensorSequence:
        """The stored tensors of one kind of one module."""
        ...


@dataclass(frozen=True, repr=False)
class Call:
    """One run of one module, forward or backward.

    Its values are attributes: `call.output`, `call.input["x"]`, `call.grad_output`, `call.grad_input`. A bare tensor
    is given as it is; a nested value as a mapping from slots; where no tensor was stored, a `Value` stands for it. A
    forward call also gives the gradients of its backward, and a backward call the input and output of its forward.

    Attributes:
        seq: number of its first event, per rank; the order of execution.
        step: the step.
        rank: the process.
        model: name of the outermost module.
        path: path of the module, `""` for the root.
        type: its class.
        call: number of this module's call in its step; a backward bears its forward's.
        phase: `forward`, `backward` or `recompute`.
        pass_: number of the backward pass through the same call.
        depth: nesting among the recorded calls of the same phase.
        parent: seq of the enclosing call, None at the outermost.
        forward: for backward and recompute, seq of the forward call.
        thread: the thread.
        start_ns: nanoseconds since the start of the recording.
        duration_ns: nanoseconds it took, None while unknown.
        error: the exception that it raised, as text.
        source: of a functional call, the line of the user's code, `file.py:12`; else None.
    """

    seq: int
    step: int
    rank: int
    model: str | None
    path: str
    type: str | None
    call: int | None
    phase: str
    pass_: int
    depth: int
    parent: int | None
    forward: int | None
    thread: int | None
    start_ns: int | None
    duration_ns: int | None
    error: str | None
    source: str | None
    lookup: Lookup = field(compare=False)

    @property
    def values(self) -> list[Value]:
        """Everything that was seen of this call, in the order in which it was seen."""
        return self.lookup.values_of(self)

    @property
    def output(self) -> Any:
        """What it returned."""
        return self.value("output")

    @property
    def input(self) -> Any:
        """What it was given, by parameter name."""
        return self.value("input")

    @property
    def grad_output(self) -> Any:
        """The gradient of its output."""
        return self.value("grad_output")

    @property
    def grad_input(self) -> Any:
        """The gradient of its input through this module."""
        return self.value("grad_input")

    def value(self, kind: str) -> Any:
        """Give the value of a kind.

        Raises:
            NotRecordedError: none was recorded for this call.
            AmbiguousError: the graph was gone through several times; take one of the backward calls.
        """
        return gather(self.select(kind), f"{self.path or '(root)'}:{kind}#{self.call}@{self.step}")

    def select(self, kind: str) -> list[Value]:
        """Give the values of a kind, one for each slot. Raises as `value`."""
        found = [value for value in self.values if value.kind == kind]
        if found:
            return found
        related = self.lookup.related(self)
        having = [found for other in related if (found := [value for value in other.values if value.kind == kind])]
        if len(having) > 1:
            raise AmbiguousError(
                f"{self.address} has {len(having)} values of kind {kind}, one for each backward pass; "
                f"take one of recording.order() with phase 'backward' and the pass_ that you mean"
            )
        if not having:
            kinds = ", ".join(sorted({value.kind for call in (self, *related) for value in call.values})) or "nothing"
            raise NotRecordedError(
                f"no {kind} was recorded for {self.address}, only {kinds}; record(..., kinds=...) says what to record"
            )
        return having[0]

    @property
    def address(self) -> str:
        """`path#call@step`."""
        return f"{self.path or '(root)'}#{self.call}@{self.step}"

    def __repr__(self) -> str:
        took = "" if self.duration_ns is None else f" {self.duration_ns / 1e6:.3g} ms"
        raised = f" raised {self.error}" if self.error else ""
        return f"{self.phase} {self.address} {self.type or ''}{took}{raised}"


def call_from_row(row: dict[str, Any], lookup: Lookup) -> Call:
    """Make a call of a row of the table `calls`."""
    return Call(
        seq=row["seq"],
        step=row["step"],
        rank=row["rank"],
        model=row["model"],
        path=row["path"] or "",
        type=row["type"],
        call=row["call"],
        phase=row["phase"] or "forward",
        pass_=row["pass"] or 0,
        depth=row["depth"] or 0,
        parent=row["parent"],
        forward=row["forward"],
        thread=row["thread"],
        start_ns=row["start_ns"],
        duration_ns=row["duration_ns"],
        error=row["error"],
        source=row["source"],
        lookup=lookup,
    )
