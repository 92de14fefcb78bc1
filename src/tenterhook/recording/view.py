"""All that was recorded of one module, or of it in one step or call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenterhook.address import Address, Kind
from tenterhook.errors import AmbiguousError, NotRecordedError
from tenterhook.recording.call import Call, Lookup
from tenterhook.recording.sequences import TensorSequence
from tenterhook.recording.spelling import spelled
from tenterhook.recording.value import Nested, Value, gather, tokens

__all__ = ["PARAMETER_KINDS", "ModuleView"]

PARAMETER_KINDS = frozenset({"param", "param_grad", "update"})
"""The kinds that belong to parameters rather than to calls."""

_SHOWN = 3


@dataclass(frozen=True, repr=False)
class ModuleView:
    """All that was recorded of one module.

    `view.output`, `.input`, `.grad_output` and `.grad_input` give the value when the module was called once; otherwise
    choose a call: `view.calls[1].output`, `view.at(step=3).output`. `view.param`, `.param_grad` and `.update` give what
    was recorded of its own parameters in one step, by name.

    Attributes:
        model: name of the outermost module.
        path: path of the module.
        step: the step that is meant, None for all.
        call: the number of the call in its step that is meant, None for all.
    """

    model: str | None
    path: str
    lookup: Lookup = field(compare=False)
    step: int | None = None
    call: int | None = None

    def at(self, *, step: int | None = None, call: int | None = None) -> ModuleView:
        """Give the same module in one step, or in the calls of one number, or both: `view.at(step=3, call=0).output`."""
        return replace(self, step=self.step if step is None else step, call=self.call if call is None else call)

    @property
    def calls(self) -> Sequence[Call]:
        """Its forward calls, in execution order."""
        return self._calls("forward")

    @property
    def backward_calls(self) -> Sequence[Call]:
        """Its backward calls, in execution order."""
        return self._calls("backward")

    def _calls(self, phase: str) -> Sequence[Call]:
        found = self.lookup.calls_of(self.model, self.path, phase, self.step)
        return found if self.call is None else [call for call in found if call.call == self.call]

    @property
    def output(self) -> Any:
        """What it returned, when it was called once."""
        return self._only("output")

    @property
    def input(self) -> Any:
        """What it was given, by parameter name, when it was called once; `.input.only()` where that is one tensor."""
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
    def param(self) -> Any:
        """Its parameters by name, when they were recorded in one step."""
        return self._of_parameters("param")

    @property
    def param_grad(self) -> Any:
        """The gradients of its parameters by name, when they were recorded in one step."""
        return self._of_parameters("param_grad")

    @property
    def update(self) -> Any:
        """What the optimizer changed in its parameters, by name, when that was recorded in one step."""
        return self._of_parameters("update")

    def value(self, kind: str, slot: str = "") -> Any:
        """Give the value of any kind, and of a nested one the part at a slot.

        Raises:
            NotRecordedError: none was recorded, or it has no such slot.
            AmbiguousError: there are several; the message says how to choose.
        """
        found = self._of_parameters(kind) if kind in PARAMETER_KINDS else self._only(kind)
        if slot and not isinstance(found, Nested):
            raise NotRecordedError(f"{self._name}:{kind} is one tensor, without a slot {slot!r}")
        if slot and slot not in list(found):
            for token in tokens(slot):
                found = found[token]
            return found
        return found[slot] if slot else found

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
        calls, name = self.calls, self._name
        if len(calls) > 1:
            raise AmbiguousError(
                f"{name} was called {len(calls)} times in this recording, so .{kind} could be any of {len(calls)}; "
                f"choose one: .calls[0].{kind} to .calls[{len(calls) - 1}].{kind}"
            )
        if not calls:
            raise NotRecordedError(self._no_call(kind))
        return calls[0].value(kind)

    def _no_call(self, kind: str) -> str:
        """Say why there is no call, and which calls there are."""
        others = self.lookup.calls_of(self.model, self.path, "forward", None)
        if not others:
            return f"no call of {self._name} was recorded, so it has no {kind}; recording.coverage says why"
        there = [call for call in others if self.step in (None, call.step)]
        if not there:
            having = {call.step for call in others}
            steps = f"step{'s' if len(having) > 1 else ''} {spelled(having, self.step or 0)}"
            return f"no call of {self._name} was recorded in step {self.step}; its calls are in {steps}"
        numbers = spelled({call.call or 0 for call in there}, self.call or 0)
        when = "" if self.step is None else f" in step {self.step}"
        return f"no call #{self.call} of {self._name} was recorded{when}; its calls{when and ' there'} are numbered {numbers}"

    def _of_parameters(self, kind: str) -> Any:
        of_steps = self.lookup.loose_of(self.model, self.path, kind)
        steps = list(of_steps) if self.step is None else [step for step in of_steps if step == self.step]
        if not steps:
            when = "" if self.step is None or not of_steps else f" in step {self.step}"
            raise NotRecordedError(
                f"no {kind} of {self._name} was recorded{when}; record(..., kinds=[..., {kind!r}]) records it"
            )
        address = str(Address(self.path, Kind(kind), step=steps[-1]))
        if len(steps) > 1:
            raise AmbiguousError(
                f"{self._name} has {kind} of {len(steps)} steps, {steps[0]} to {steps[-1]}; "
                f"choose one: .at(step={steps[-1]}).{kind}, or recording[{address!r}]"
            )
        values: list[Value] = of_steps[steps[0]]
        ranks = sorted({value.rank for value in values})
        if len(ranks) > 1:
            raise AmbiguousError(
                f"{address} was recorded by {len(ranks)} ranks; open one, ranks=[{ranks[0]}], or take recording.merged()"
            )
        return gather(values, address)

    @property
    def _name(self) -> str:
        return self.path or "(root)"

    def __repr__(self) -> str:
        calls = self.calls
        kind = calls[0].type if calls else None
        lines = [f"{self._name} {kind or ''}: {len(calls)} call{'' if len(calls) == 1 else 's'}"]
        for call in calls[:_SHOWN]:
            belonging = [call, *(other for other in self.lookup.related(call) if other.phase == "backward")]
            lines += [f"  {value!r}" for one in belonging for value in one.values]
        return "\n".join(lines + (["  ..."] if len(calls) > _SHOWN else []))
