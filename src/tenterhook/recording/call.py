"""One call of one module, and all calls of one module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from tenterhook.errors import AmbiguousError, NotRecordedError
from tenterhook.recording.sequences import TensorSequence
from tenterhook.recording.value import Value, gather

__all__ = ["Call", "Lookup", "ModuleView", "call_from_row"]


class Lookup(Protocol):
    """What a call asks of its recording."""

    def calls_of(self, model: str | None, path: str | None) -> list[Call]:
        """All calls of one module, of every phase, in execution order."""
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
        related = [other for other in self.lookup.calls_of(self.model, self.path) if self._is_related(other)]
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

    def _is_related(self, other: Call) -> bool:
        if other.rank != self.rank:
            return False
        if self.phase == "forward":
            return other.phase == "backward" and other.forward == self.seq
        return self.forward is not None and other.phase == "forward" and other.seq == self.forward

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


@dataclass(frozen=True, repr=False)
class ModuleView:
    """All that was recorded of one module.

    `view.output`, `.input`, `.grad_output` and `.grad_input` give the value when the module was called once; otherwise
    choose a
    call: `view.calls[1].output`.

    Attributes:
        model: name of the outermost module.
        path: path of the module.
    """

    model: str | None
    path: str
    lookup: Lookup = field(compare=False)

    @property
    def calls(self) -> list[Call]:
        """Its forward calls, in execution order."""
        return [call for call in self.lookup.calls_of(self.model, self.path) if call.phase == "forward"]

    @property
    def backward_calls(self) -> list[Call]:
        """Its backward calls, in execution order."""
        return [call for call in self.lookup.calls_of(self.model, self.path) if call.phase == "backward"]

    @property
    def output(self) -> Any:
        """What it returned, when it was called once."""
        return self._only("output")

    @property
    def input(self) -> Any:
        """What it was given, by parameter name, when it was called once."""
        return self._only("input")

    @property
    def grad_output(self) -> Any:
        """The gradient of its output, when it was called once."""
        return self._only("grad_output")

    @property
    def grad_input(self) -> Any:
        """The gradient of its input, when it was called once."""
        return self._only("grad_input")

    @property
    def outputs(self) -> TensorSequence:
        """Its stored outputs over all steps and calls, each read when asked for."""
        return self.tensors("output")

    @property
    def inputs(self) -> TensorSequence:
        """Its stored inputs over all steps and calls, each read when asked for."""
        return self.tensors("input")

    @property
    def grad_outputs(self) -> TensorSequence:
        """Its stored output gradients over all steps and calls, each read when asked for."""
        return self.tensors("grad_output")

    def tensors(self, kind: str, slot: str | None = None) -> TensorSequence:
        """Give the stored tensors of a kind over all steps and calls.

        Args:
            kind: `output`, `grad_output`, `input`, ...
            slot: which part of a nested value; may be left out where there is one.

        Raises:
            NotRecordedError: no tensor of that kind was stored.
            AmbiguousError: the value is nested and no slot was named.
        """
        return self.lookup.sequence(self.model, self.path, kind, slot)

    def _only(self, kind: str) -> Any:
        calls = self.calls
        name = self.path or "(root)"
        if len(calls) > 1:
            raise AmbiguousError(
                f"{name} was called {len(calls)} times in this recording, so .{kind} could be any of {len(calls)}; "
                f"choose one: .calls[0].{kind} to .calls[{len(calls) - 1}].{kind}"
            )
        if not calls:
            raise NotRecordedError(f"no call of {name} was recorded, so it has no {kind}; recording.coverage says why")
        return calls[0].value(kind)

    def __repr__(self) -> str:
        calls = self.calls
        kind = calls[0].type if calls else None
        lines = [f"{self.path or '(root)'} {kind or ''}: {len(calls)} calls"]
        lines += [f"  {value!r}" for call in calls[:3] for value in call.values]
        return "\n".join(lines + (["  ..."] if len(calls) > 3 else []))
