"""Changing activations and gradients while a model runs: ``th.edit(model)``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

from typing_extensions import Self

from tenterhook import active_edits
from tenterhook.address import Address, Kind
from tenterhook.backends import Backend, find_backend
from tenterhook.calls import Watched
from tenterhook.edit_values import EditValue
from tenterhook.editing import EditedModule, ModuleEdit, Rule, Session, described, value_function
from tenterhook.errors import HookError, StopForward, TenterhookWarning
from tenterhook.gathering import Gathering
from tenterhook.handles import Handle, HookSite
from tenterhook.parameters import tap_parameter
from tenterhook.reasons import NO_GRADIENT_HERE, SiteReasons, WeightUse
from tenterhook.replacing import allowed
from tenterhook.selection import Entry, Selection, describe, resolve
from tenterhook.text_table import text_table
from tenterhook.tracker import Tracker

__all__ = ["EditHandle", "Editor", "edit"]

Numbers: TypeAlias = "int | Iterable[int] | None"
"""Which calls or steps: one number, several (a range), or all."""


class EditHandle(Handle):
    """One edit, on one place or on many: ``.fired``, ``.live``, ``.remove()``; removes itself at the end of a ``with``.

    With a single edit the session can go without a name, and ends with the handle:
    ``with th.edit(model).output("layer3", th.edits.scale(0.5)): model(x)``.
    """

    __slots__ = ("editor", "rule", "select")

    def __init__(self, editor: Editor, rule: Rule, select: str) -> None:
        super().__init__(())
        self.editor = editor
        self.rule = rule
        self.select = select

    def __exit__(  # pyright: ignore[reportIncompatibleMethodOverride] - a stop ends here
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if self.editor.is_only(self):
            return self.editor.__exit__(kind, error, traceback)
        self.remove()
        return None

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


class Editor:
    """Edits of one model; see :func:`tenterhook.edit`.

    Attributes:
        stopped: after a forward was ended by :meth:`stop`, where (``.address``) and with what (``.value``); else None.
    """

    def __init__(self, model: Any, *, scaler: Any = None) -> None:
        self._backend: Backend = find_backend(model)
        self._backend.check(model)
        self._entries = self._backend.entries(model)
        self._model_name = type(self._entries[0].module).__name__
        self._parameters = self._backend.parameters(model)
        self._weights = WeightUse(self._backend, model)
        self._gathering = Gathering(self._backend)
        self._tracker = Tracker(self._backend, lambda: None, lambda step: None)
        self._session = Session(self._backend, self._tracker, self, scaler)
        self._modules: dict[str, EditedModule] = {}
        self._handles: list[EditHandle] = []
        self._closed = False
        self._entered = False
        self.stopped: StopForward | None = None
        self._stack = self._backend.seeing_everything(model)
        self._told = self._stack.__enter__()
        self._steps = self._backend.on_optimizer_step(self._tracker.optimizer_stepped)
        self._module(self._entries[0]).follow()  # its calls make steps
        active_edits.opened(self)

    # --- registration ----------------------------------------------------------------------------------------------
    def output(
        self,
        select: Selection,
        value: Any,
        *,
        slot: str | None = None,
        call: Numbers = None,
        step: Numbers = None,
        allow: str | Collection[str] = (),
    ) -> EditHandle:
        """Change what the selected modules return.

        Args:
            select: which modules (see :mod:`tenterhook.selection`).
            value: ``fn(value)`` or ``fn(value, address)`` that returns the new value, or None to leave it alone; or one of
                :mod:`tenterhook.edits`. A function is given the whole value, an edit value its only tensor.
            slot: which part of a nested value, ``"[0]"``; ``"**"`` for every tensor in it, each by itself.
            call: in which calls of a step, counted from 0.
            step: in which steps, counted from 0 since the session began (see :meth:`step`).
            allow: what may change: ``"structure"``, ``"shape"``, ``"dtype"``, ``"device"``.

        Raises:
            SelectionError: nothing matches, or a container that is never called is named.
            HookError: ``value`` is no function of one or two arguments and no edit value.
        """
        return self._on_modules("output", select, value, slot, call, step, allow)

    def input(
        self,
        select: Selection,
        value: Any,
        *,
        slot: str | None = None,
        call: Numbers = None,
        step: Numbers = None,
        allow: str | Collection[str] = (),
    ) -> EditHandle:
        """Change what the selected modules are given: the only argument that holds tensors, or the one that ``slot`` names.

        Arguments as in :meth:`output`; slots begin with the parameter's name: ``"x"``, ``"mask[0]"``.
        """
        return self._on_modules("input", select, value, slot, call, step, allow)

    def grad_output(
        self,
        select: Selection,
        value: Any,
        *,
        slot: str | None = None,
        call: Numbers = None,
        step: Numbers = None,
        allow: str | Collection[str] = (),
    ) -> EditHandle:
        """Change the gradients of what the selected modules return, tensor by tensor, before they go on into them.

        Arguments as in :meth:`output`; without ``slot`` every tensor's. The session has to be open in the backward pass.
        """
        return self._on_modules("grad_output", select, value, slot, call, step, allow)

    def grad_input(
        self,
        select: Selection,
        value: Any,
        *,
        slot: str | None = None,
        call: Numbers = None,
        step: Numbers = None,
        allow: str | Collection[str] = (),
    ) -> EditHandle:
        """Change the gradients that go out of the selected modules to their inputs, the part through this module only.

        Arguments as in :meth:`input`; without ``slot`` every tensor's. The session has to be open in the backward pass.
        """
        return self._on_modules("grad_input", select, value, slot, call, step, allow)

    def param_grad(
        self, select: Selection, value: Any, *, step: Numbers = None, allow: str | Collection[str] = ()
    ) -> EditHandle:
        """Change the gradient that a backward pass brings to the selected parameters, before it is added to ``.grad``.

        Args:
            select: names of parameters: ``"*.weight"``, ``"features.0.weight"``.
            value: as in :meth:`output`; ``th.edits.clip_norm(1.0, together=True)`` acts as its docstring says.
            step: in which steps.
            allow: what may change.
        """
        self._check_open()
        entries = [
            Entry(path=one.name, module=one.parameter, aliases=one.aliases, type_names=(type(one.parameter).__name__,))
            for one in self._parameters
        ]
        chosen = resolve(select, entries, what="parameter")
        rule = _rule("param_grad", value, None, None, step, allow)
        handle = EditHandle(self, rule, ", ".join(describe(select)))
        try:
            if isinstance(value, EditValue) and value.options.get("together"):
                self._together(handle, value, chosen)
            else:
                fn = value_function(value, self._backend, "param_grad")
                for entry in chosen:
                    self._on_parameter(handle, entry, fn)
        except BaseException:
            handle.remove()
            raise
        self._handles.append(handle)
        return handle

    def skip(
        self,
        select: Selection,
        value: Any = None,
        *,
        slot: str | None = None,
        call: Numbers = None,
        step: Numbers = None,
    ) -> EditHandle:
        """Leave the selected modules out: their first input (or that at ``slot``) is passed on as their output.

        The module does not run, and neither do hooks on it, ours or others': to them it was not called. For a module that
        returns something else than its input, ``value`` makes it: ``lambda x: (x, None)``.
        """
        return self._on_modules("skip", select, value, slot, call, step, ())

    def stop(self, select: Selection, *, call: Numbers = None, step: Numbers = None) -> EditHandle:
        """End the forward where a selected module has run, its hooks included; what comes after it does not run.

        The end is an exception that no ``except Exception`` catches. The ``with`` statement of the session does: the program
        goes on after it. To go on inside, call the model by :meth:`run`.
        """
        return self._on_modules("stop", select, None, None, call, step, ())

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn`` and return what it returns; where :meth:`stop` ends it, what the last module gave."""
        try:
            return fn(*args, **kwargs)
        except StopForward as stop:
            if stop.owner is not self:
                raise
            self.stopped = stop
            return stop.value

    def step(self) -> None:
        """Say that a step has ended. From the first call on, nothing else ends a step in this session.

        Otherwise a step ends when an optimizer steps; without one each outermost forward of the model is a step, as is each
        token of a generation loop.
        """
        self._tracker.user_stepped()

    def _on_modules(
        self, kind: str, select: Selection, value: Any, slot: str | None, call: Numbers, step: Numbers, allow: Any
    ) -> EditHandle:
        self._check_open()
        chosen = resolve(
            select, self._entries, require_callable=True, parameters=[one.name for one in self._parameters]
        )
        if isinstance(value, EditValue) and value.options.get("together"):
            raise HookError(
                f"{value!r} is for param_grad only, here it is {kind}\n"
                "  gradients of one module depend on the edited ones of another: clip each by itself, with clip_norm(...)"
            )
        rule = _rule(kind, value, slot, call, step, allow)
        fn = (lambda value, address: None) if value is None and kind in ("skip", "stop") else None
        fn = fn or value_function(value, self._backend, kind)
        handle = EditHandle(self, rule, ", ".join(describe(select)))
        try:
            for entry in chosen:
                site = HookSite(kind, entry.path, fn)
                handle.sites.append(site)
                self._module(entry).add(ModuleEdit(self._session, rule, site))
        except BaseException:
            handle.remove()
            raise
        self._handles.append(handle)
        return handle

    def _module(self, entry: Entry) -> EditedModule:
        if entry.path not in self._modules:
            watched = Watched(self._model_name, entry, wanted=True)
            self._modules[entry.path] = EditedModule(self._session, watched, entry.module)
        return self._modules[entry.path]

    def _on_parameter(self, handle: EditHandle, entry: Entry, fn: Callable[[Any, Any], Any]) -> None:
        path, _, name = entry.path.rpartition(".")
        site = HookSite("param_grad", entry.path, fn)
        handle.sites.append(site)
        edit = ModuleEdit(self._session, handle.rule, site)
        owner = {one.path: one.module for one in self._entries}.get(path)
        tap = tap_parameter(
            self._backend, owner, entry.module, partial(self._parameter_gradient, edit, path, name), edits=True
        )
        if isinstance(tap, str):
            site.reason = f"no gradient: {tap}"
        else:
            site.attached(tap)

    def _parameter_gradient(self, edit: ModuleEdit, path: str, name: str, gradient: Any) -> Any:
        edit.site.calls += 1
        if not edit.rule.matches(None, self._tracker.step):
            return None
        return edit.gradient("", Address(path, Kind.PARAM_GRAD, name, step=self._tracker.step), gradient)

    def _together(self, handle: EditHandle, value: EditValue, chosen: list[Entry]) -> None:
        self._backend.clip_together([], value.options["max_norm"])  # refuses where the framework cannot
        site = HookSite("param_grad", handle.select, lambda value, address: None)
        handle.sites.append(site)
        parameters = [entry.module for entry in chosen]

        def before_step(optimizer: Any) -> None:
            if site.live and handle.rule.matches(None, self._tracker.step):
                site.fired += 1
                self._backend.clip_together(parameters, value.options["max_norm"])

        site.attached(self._backend.on_optimizer_step(before_step, before=True))

    # --- the end ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Take every edit off. A second call does nothing."""
        self._close(warn=True)

    remove = close

    def _close(self, *, warn: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._gathering.close()
            sites = self._sites()
            reasons = self._reasons()
            for site, rule in sites:
                site.reason = self._why(site, rule, reasons) or None
            idle = [one for one in self._handles if not one.fired and not any(s.recomputed for s in one.sites)]
        finally:
            for handle in self._handles:
                handle.remove()
            for module in self._modules.values():
                module.close()
            self._steps.remove()
            self._stack.__exit__(None, None, None)
            active_edits.closed(self)
        if warn and idle:
            lines = [f"  {one.select} {one.rule.kind} {described(one.rule.value)}: {_reason(one)}" for one in idle]
            warnings.warn("edits that never ran:\n" + "\n".join(lines), TenterhookWarning, stacklevel=4)

    def is_only(self, handle: EditHandle) -> bool:
        """Whether a handle is all that there is of this session: its only edit, while no ``with`` holds the session itself."""
        return not self._entered and self._handles == [handle]

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        # "| None": to type checkers what follows the statement then sees what was bound in it
        stop = error if isinstance(error, StopForward) and error.owner is self else None
        self.stopped = stop or self.stopped
        self._close(warn=error is None)
        return stop is not None

    def _check_open(self) -> None:
        if self._closed:
            raise HookError("this editor is closed: its edits are off\n  call th.edit(model) again for another one")

    # --- looking ---------------------------------------------------------------------------------------------------
    def _sites(self) -> list[tuple[HookSite, Rule]]:
        return [(site, handle.rule) for handle in self._handles for site in handle.sites]

    def _reasons(self) -> SiteReasons:
        sites = [site for site, _ in self._sites()]
        return SiteReasons(self._backend, self._entries, sites, self._weights, self._gathering)

    def _why(self, site: HookSite, rule: Rule, reasons: SiteReasons) -> str:
        if site.fired or site.recomputed or not site.in_place or site.reason or not site.calls:
            return reasons.why(site)
        if rule.call is not None or rule.step is not None:
            wanted = [
                f"{name} {_numbers(numbers)}" for name, numbers in (("call", rule.call), ("step", rule.step)) if numbers
            ]
            return f"called {site.calls} times, never in {' of '.join(wanted)} (or no gradient came then)"
        return reasons.why(site) if rule.kind.startswith("grad") else "called, but not edited: the value held no tensor"

    def describe(self) -> list[dict[str, Any]]:
        """Say what the edits are as plain data, one dictionary each."""
        return [handle.describe() for handle in self._handles]

    def modules(self) -> list[Any]:
        """Return all modules of the model."""
        return [entry.module for entry in self._entries]

    @property
    def fired(self) -> int:
        """How often edits of this session have run."""
        return sum(handle.fired for handle in self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __bool__(self) -> bool:
        return True  # also while there is no edit yet

    def __str__(self) -> str:
        reasons = None if self._closed else self._reasons()
        rows = [("path", "kind", "edit", "where", "ran", "")]
        for site, rule in self._sites():
            why = (site.reason or "") if reasons is None else self._why(site, rule, reasons)
            where = [rule.slot] if rule.slot else []
            where += [f"call {_numbers(rule.call)}"] if rule.call else []
            where += [f"step {_numbers(rule.step)}"] if rule.step else []
            rows.append((
                site.path or "(root)", rule.kind, described(rule.value), ", ".join(where), str(site.fired),
                why or ("" if site.live or self._closed else "removed"),
            ))  # fmt: skip
        return f"edits on {self._model_name}\n" + text_table(rows) + "".join(f"\n{line}" for line in self._told)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Editor of {self._model_name}: {len(self)} edits, ran {self.fired} times, {state}>"


def _rule(kind: str, value: Any, slot: str | None, call: Numbers, step: Numbers, allow: Any) -> Rule:
    return Rule(kind, value, slot, _chosen(call, "call"), _chosen(step, "step"), allowed(allow))


def _chosen(numbers: Any, what: str) -> frozenset[int] | None:
    if numbers is None:
        return None
    chosen = [numbers] if isinstance(numbers, int) else list(numbers)
    if not all(isinstance(one, int) and one >= 0 for one in chosen):
        raise HookError(
            f"{what}={numbers!r} is no number of a {what}\n  they count from 0: {what}=0, {what}=range(2, 5)"
        )
    return frozenset(chosen)


def _numbers(chosen: frozenset[int] | None) -> str:
    found = sorted(chosen or ())
    return ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")


def _reason(handle: EditHandle) -> str:
    return next((site.reason for site in handle.sites if site.reason), NO_GRADIENT_HERE)


def edit(model: Any, *, scaler: Any = None) -> Editor:
    """Open a set of edits on ``model``, best in a ``with`` statement: all of them come off at its end, however it ends.

    ```python
    with th.edit(model) as edit:
        edit.output("layer3", th.edits.scale(0.5))
        edit.grad_output("layer1", lambda gradient: gradient.clamp(-1, 1))
        edit.param_grad("**", th.edits.clip_norm(1.0))
        model(x).sum().backward()
    ```

    Edits of one value run in the order in which they were registered. What observes, :func:`tenterhook.record` and
    :func:`tenterhook.hooks`, sees the edited value, whichever was opened first; hooks put on with ``prepend=True`` see it as it
    was. An edit applies again where activation checkpointing recomputes what it changed, also after the session is closed.
    ``print(edit)`` shows each edit, how often it ran and why it did not; edits that never ran are warned of at the end.

    Args:
        model: a torch ``Module`` or MindSpore ``Cell``.
        scaler: the ``GradScaler`` of a loss that is scaled: edits of gradients are given them unscaled.

    Raises:
        HookError: ``model`` is no module.
        UnsupportedError: it cannot be hooked (a script module).
    """
    return Editor(model, scaler=scaler)
