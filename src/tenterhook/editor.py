"""Changing activations and gradients while a model runs: ``th.edit(model)``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from typing_extensions import Self, Unpack

from tenterhook import active_edits
from tenterhook.backends import Backend, find_backend
from tenterhook.calls import Watched
from tenterhook.edit_handle import EditHandle
from tenterhook.edit_rules import Numbers, Rule, Where, described, value_function
from tenterhook.edit_values import EditValue
from tenterhook.editing import EditedModule, ModuleEdit, Session
from tenterhook.errors import HookError, StopForward, TenterhookWarning
from tenterhook.gathering import Gathering
from tenterhook.handles import HookSite
from tenterhook.model_ref import ModelRef
from tenterhook.open_paths import see_everything
from tenterhook.parameter_edits import put_on_parameters
from tenterhook.reasons import NO_GRADIENT_HERE, SiteReasons, WeightUse
from tenterhook.selection import Entry, Selection, describe, resolve
from tenterhook.text_table import text_table
from tenterhook.tracker import Tracker

__all__ = ["Editor", "edit"]

_NOT_STARTED = "not put on: use with th.edit(model) as edit, or edit.start()"


class Editor:
    """Edits of one model; see :func:`tenterhook.edit`.

    Attributes:
        stopped: after a forward was ended by :meth:`stop`, where (``.address``) and with what (``.value``); else None.
    """

    def __init__(self, model: Any, *, scaler: Any = None) -> None:
        self._handles: list[EditHandle] = []
        self._state: Literal["new", "running", "closed"] = "new"
        self._backend: Backend = find_backend(model)
        self._backend.check(model)
        self._model = ModelRef(self._backend, model)
        self._session = Session(self._backend, self, scaler)
        self._gathering = Gathering(self._backend)
        self._weights: WeightUse | None = None
        self._modules: dict[str, EditedModule] = {}
        self._stack = contextlib.ExitStack()
        self._told: Sequence[str] = ()
        self.stopped: StopForward | None = None

    # --- registration ----------------------------------------------------------------------------------------------
    def output(self, select: Selection, value: Any, **where: Unpack[Where]) -> EditHandle:
        """Change what the selected modules return.

        Args:
            select: which modules (see :mod:`tenterhook.selection`).
            value: ``fn(value)`` or ``fn(value, address)`` that returns the new value, or None to leave it alone; or one of
                :mod:`tenterhook.edits`. A function is given the whole value, an edit value its only tensor.
            where: ``slot=`` says which part of a nested value (``"[0]"``; ``"**"`` for every tensor in it, each by itself),
                ``call=`` in which calls of a step and ``step=`` in which steps (a number or several, from 0), ``allow=``
                what may change (``"structure"``, ``"shape"``, ``"dtype"``, ``"device"``, ``"detached"``).

        Raises:
            SelectionError: nothing matches, or a container that is never called is named.
            HookError: ``value`` is no function of one or two arguments and no edit value.
        """
        return self._on_modules("output", select, value, where)

    def input(self, select: Selection, value: Any, **where: Unpack[Where]) -> EditHandle:
        """Change what the selected modules are given: the only argument that holds tensors, or the one that ``slot`` names.

        Arguments as in :meth:`output`; slots begin with the parameter's name: ``"x"``, ``"mask[0]"``.
        """
        return self._on_modules("input", select, value, where)

    def grad_output(self, select: Selection, value: Any, **where: Unpack[Where]) -> EditHandle:
        """Change the gradients of what the selected modules return, tensor by tensor, before they go on into them.

        Arguments as in :meth:`output`; without ``slot`` every tensor's. The session has to be open in the backward pass.
        """
        return self._on_modules("grad_output", select, value, where)

    def grad_input(self, select: Selection, value: Any, **where: Unpack[Where]) -> EditHandle:
        """Change the gradients that go out of the selected modules to their inputs, the part through this module only.

        Arguments as in :meth:`input`; without ``slot`` every tensor's. The session has to be open in the backward pass.
        """
        return self._on_modules("grad_input", select, value, where)

    def param_grad(self, select: Selection, value: Any, *, step: Numbers = None, allow: Any = ()) -> EditHandle:
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
            for one in self._model.parameters()
        ]
        chosen = resolve(select, entries, what="parameter")
        rule = Rule.of("param_grad", value, step=step, allow=allow)
        if _is_together(value):
            return self._keep(rule, select, [_shown(select)], lambda value, address: None, chosen)
        fn = value_function(value, self._backend, "param_grad")
        return self._keep(rule, select, [entry.path for entry in chosen], fn)

    def skip(self, select: Selection, value: Any = None, **where: Unpack[Where]) -> EditHandle:
        """Leave the selected modules out: their first input (or that at ``slot``) is passed on as their output.

        The module does not run, and neither do hooks on it, ours or others': to them it was not called. For a module that
        returns something else than its input, ``value`` makes it: ``lambda x: (x, None)``.
        """
        return self._on_modules("skip", select, value, where)

    def stop(self, select: Selection, *, call: Numbers = None, step: Numbers = None) -> EditHandle:
        """End the forward where a selected module has run, its hooks included; what comes after it does not run.

        The end is an exception that no ``except Exception`` catches. The ``with`` statement of the session does: the program
        goes on after it. To go on inside, call the model by :meth:`run`.
        """
        return self._on_modules("stop", select, None, Where(call=call, step=step))

    def _on_modules(self, kind: str, select: Selection, value: Any, where: Where) -> EditHandle:
        self._check_open()
        unknown = sorted(where.keys() - Where.__annotations__.keys())
        if unknown:
            raise TypeError(f"{kind}() has no keyword {unknown[0]!r}; there are {', '.join(Where.__annotations__)}")
        self._model.get("edits")
        names = [one.name for one in self._model.parameters()]
        chosen = resolve(select, self._model.entries(), require_callable=True, parameters=names)
        if _is_together(value):
            raise HookError(
                f"{value!r} is for param_grad only, here it is {kind}\n"
                "  gradients of one module depend on the edited ones of another: clip each by itself, with clip_norm(...)"
            )
        rule = Rule.of(kind, value, **where)
        fn = (lambda value, address: None) if value is None and kind in ("skip", "stop") else None
        fn = fn or value_function(value, self._backend, kind)
        return self._keep(rule, select, [entry.path for entry in chosen], fn)

    def _keep(
        self, rule: Rule, select: Selection, paths: list[str], fn: Callable[..., Any], together: Sequence[Entry] = ()
    ) -> EditHandle:
        handle = EditHandle(self, rule, _shown(select), [HookSite(rule.kind, path, fn) for path in paths])
        handle.together = [entry.path for entry in together]
        if self._state == "running":
            try:
                self._put_on(handle)
            except BaseException:
                handle.remove()
                raise
        self._handles.append(handle)
        return handle

    # --- putting on ------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Put the edits on; those that are registered later go on at once. ``with`` does this.

        Raises:
            HookError: the session is open or closed already, or the model is gone.
        """
        if self._state != "new":
            raise HookError(f"this editor is {self._state} already\n  call th.edit(model) again for another one")
        model = self._model.get("edits")
        self._state = "running"
        try:
            self._weights = WeightUse(self._backend, model)
            tracker = self._session.tracker = Tracker(self._backend, lambda: None, lambda step: None)
            self._told, end = see_everything(self._backend, model)
            self._stack.callback(end)
            self._stack.callback(self._backend.on_optimizer_step(tracker.optimizer_stepped).remove)
            self._module("").follow()  # its calls make steps
            active_edits.opened(self)
            for handle in self._handles:
                self._put_on(handle)
        except BaseException:
            self.end(warn=False)
            raise
        return self

    def _put_on(self, handle: EditHandle) -> None:
        if handle.rule.kind == "param_grad":
            put_on_parameters(self._session, self._model, handle)
            return
        for site in handle.sites:
            self._module(site.path).add(ModuleEdit(self._session, handle.rule, site))

    def _module(self, path: str) -> EditedModule:
        if path not in self._modules:
            entry = next((one for one in self._model.entries() if one.path == path), None)
            if entry is None:
                raise HookError(f"the module '{path}' is gone since the edit was registered")
            watched = Watched(self._model.name, entry, wanted=True)
            self._modules[path] = EditedModule(self._session, watched, entry.module)
        return self._modules[path]

    # --- running ---------------------------------------------------------------------------------------------------
    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn`` with the edits on, and return what it returns; where :meth:`stop` ends it, what the last module gave.

        Outside of a ``with`` statement the session is that one call:
        ``th.edit(model).output("layer3", th.edits.scale(0.5)).run(model, x)``.
        """
        if self._state != "running":
            with self:
                return self.run(fn, *args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except StopForward as stop:
            if stop.owner is not self:
                raise
            self.stopped = stop.with_traceback(None)
            return stop.value

    def step(self) -> None:
        """Say that a step has ended. From the first call on, nothing else ends a step in this session.

        Otherwise a step ends when an optimizer steps; without one each outermost forward of the model is a step, as is each
        token of a generation loop.
        """
        if self._state != "running":
            raise HookError(f"this editor is {self._state}: no steps are counted\n  call it inside the with statement")
        self._session.tracker.user_stepped()

    # --- the end ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Take every edit off. A second call does nothing."""
        self.end(warn=True)

    remove = close

    def end(self, *, warn: bool, level: int = 3) -> None:
        """Take every edit off, and warn of those that never ran.

        Args:
            warn: whether to.
            level: how many calls up the warning points.
        """
        before, self._state = self._state, "closed"
        if before == "closed":
            return
        idle: list[EditHandle] = []
        try:
            self._gathering.close()
            sites = self._sites()
            reasons = self._reasons() if before == "running" else None
            for site, rule in sites:
                site.reason = self._why(site, rule, reasons) or None
            idle = [one for one in self._handles if not one.fired and not any(s.recomputed for s in one.sites)]
        finally:
            if before == "running":
                self._session.abandon()
            for handle in self._handles:
                handle.remove()
            for module in self._modules.values():
                module.close()
            self._stack.close()
            active_edits.closed(self)
        if warn and idle:
            lines = [f"  {one}: {_reason(one)}" for one in idle]
            warnings.warn("edits that never ran:\n" + "\n".join(lines), TenterhookWarning, stacklevel=level)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        # "| None": to type checkers what follows the statement then sees what was bound in it
        return self.leave(error, level=4)

    def leave(self, error: BaseException | None, *, level: int) -> bool:
        """End the session at the end of a ``with`` statement; True where its own stop has ended that."""
        mine = error if isinstance(error, StopForward) and error.owner is self else None
        if mine is not None:
            self.stopped = mine.with_traceback(None)  # which holds on to the model
        self.end(warn=error is None, level=level)
        return mine is not None

    def __del__(self) -> None:
        if self._state == "new" and self._handles:
            warnings.warn(f"edits of {self._model.name} were {_NOT_STARTED}", TenterhookWarning, stacklevel=2)

    def _check_open(self) -> None:
        if self._state == "closed":
            raise HookError("this editor is closed: its edits are off\n  call th.edit(model) again for another one")

    # --- looking ---------------------------------------------------------------------------------------------------
    def _sites(self) -> list[tuple[HookSite, Rule]]:
        return [(site, handle.rule) for handle in self._handles for site in handle.sites]

    def _reasons(self) -> SiteReasons:
        assert self._weights is not None
        sites = [site for site, _ in self._sites()]
        return SiteReasons(self._backend, self._model.entries(), sites, self._weights, self._gathering)

    def _why(self, site: HookSite, rule: Rule, reasons: SiteReasons | None) -> str:
        if reasons is None:
            return _NOT_STARTED
        if site.fired or site.recomputed or not site.in_place or site.reason or not site.calls:
            return reasons.why(site)
        if rule.times:
            often = "once" if site.calls == 1 else f"{site.calls} times"
            gradient = " (or no gradient came then)" if "grad" in rule.kind else ""
            return f"called {often}, never in {' of '.join(rule.times)}{gradient}"
        return reasons.why(site) if rule.kind.startswith("grad") else "called, but not edited: the value held no tensor"

    def describe(self) -> list[dict[str, Any]]:
        """Say what the edits are as plain data, one dictionary each."""
        return [handle.describe() for handle in self._handles]

    def module_refs(self) -> Sequence[active_edits.ModuleRef]:
        """Return weak references to the modules of the model, the root first."""
        return self._model.refs

    @property
    def running(self) -> bool:
        """Whether the edits are on."""
        return self._state == "running"

    @property
    def fired(self) -> int:
        """How often edits of this session have run."""
        return sum(handle.fired for handle in self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __bool__(self) -> bool:
        return True  # also while there is no edit yet

    def __str__(self) -> str:
        reasons = self._reasons() if self.running else None
        rows = [("path", "kind", "edit", "where", "ran", "")]
        for site, rule in self._sites():
            why = (site.reason or "") if self._state == "closed" else self._why(site, rule, reasons)
            where = ([rule.slot] if rule.slot else []) + rule.times
            rows.append((
                site.path or "(root)", rule.kind, described(rule.value), ", ".join(where), str(site.fired),
                why or site.warning or ("removed" if self.running and not site.live else ""),
            ))  # fmt: skip
        return f"edits on {self._model.name}\n" + text_table(rows) + "".join(f"\n{line}" for line in self._told)

    def __repr__(self) -> str:
        state = {"new": "not started", "running": "open", "closed": "closed"}[self._state]
        return f"<Editor of {self._model.name}: {len(self)} edits, ran {self.fired} times, {state}>"


def _is_together(value: Any) -> bool:
    return isinstance(value, EditValue) and bool(value.options.get("together"))


def _shown(select: Selection) -> str:
    return ", ".join(describe(select))


def _reason(handle: EditHandle) -> str:
    return next((site.reason for site in handle.sites if site.reason), NO_GRADIENT_HERE)


def edit(model: Any, *, scaler: Any = None) -> Editor:
    """Make a set of edits for ``model``: they are on for the length of a ``with`` statement, and all off at its end, however it ends.

    ```python
    with th.edit(model) as edit:
        edit.output("layer3", th.edits.scale(0.5))
        edit.grad_output("layer1", lambda gradient: gradient.clamp(-1, 1))
        edit.param_grad("**", th.edits.clip_norm(1.0))
        model(x).sum().backward()
    ```

    ``edit.start()`` and ``edit.close()`` do the same where no ``with`` fits, ``edit.run(model, x)`` for a single call. Before the
    start nothing is put on; the model is never kept alive. An editor that is started and only dropped leaves its edits on.

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
