"""What registering an edit gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from tenterhook.edit_rules import Rule, described
from tenterhook.errors import StopForward
from tenterhook.handles import Handle, HookSite

__all__ = ["EditHandle"]


class _Editor(Protocol):
    """The session that an edit belongs to."""

    stopped: StopForward | None

    @property
    def running(self) -> bool: ...

    def start(self) -> Any: ...

    def leave(self, error: BaseException | None, *, level: int) -> bool: ...

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


class EditHandle(Handle):
    """One edit, on one place or on many: ``.fired``, ``.live``, ``.remove()``; removes itself at the end of a ``with``.

    With a single edit the session can go without a name: a ``with`` that finds it not yet started opens it, and ends it:
    ``with th.edit(model).output("layer3", th.edits.scale(0.5)): model(x)``.
    """

    __slots__ = ("_starts", "editor", "rule", "select", "together")

    def __init__(self, editor: _Editor, rule: Rule, select: str, sites: Sequence[HookSite]) -> None:
        super().__init__(sites)
        self.editor = editor
        self.rule = rule
        self.select = select
        self.together: Sequence[str] = ()  # parameters that are edited at once, right before the optimizer steps
        self._starts = False

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn`` with the session's edits on; see :meth:`tenterhook.Editor.run`."""
        return self.editor.run(fn, *args, **kwargs)

    @property
    def stopped(self) -> StopForward | None:
        """Where and with what a stop of the session has ended the forward, None where none has."""
        return self.editor.stopped

    def __enter__(self) -> Self:
        self._starts = not self.editor.running
        if self._starts:
            self.editor.start()
        return self

    def __exit__(  # pyright: ignore[reportIncompatibleMethodOverride] - a stop ends here
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if self._starts:
            return self.editor.leave(error, level=4)
        self.remove()
        return None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.select, self.rule.kind, described(self.rule.value))))

    def describe(self) -> dict[str, Any]:
        """Say what it is as plain data, as ``recording.json`` holds it."""
        rule = self.rule
        said: dict[str, Any] = {
            "kind": rule.kind,
            "select": self.select,
            "value": described(rule.value),
            "ran": self.fired,
        }
        more = {"slot": rule.slot, "call": rule.call and sorted(rule.call), "step": rule.step and sorted(rule.step)}
        return said | {name: value for name, value in more.items() if value is not None}
