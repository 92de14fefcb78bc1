"""Hooks on a selection of modules, put on together and taken off together: ``th.hooks(model)``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tenterhook.backends import Backend, find_backend
from tenterhook.call_hooks import BackwardHook, ForwardHook, ForwardPreHook
from tenterhook.errors import HookError
from tenterhook.event_hooks import GradientHook
from tenterhook.gathering import Gathering
from tenterhook.handles import Handle, HookSite, check_signature, name_of, without_cycle
from tenterhook.open_paths import see_everything
from tenterhook.parameters import tap_parameter
from tenterhook.process_hooks import ProcessHooks
from tenterhook.reasons import SiteReasons, WeightUse
from tenterhook.replacing import allowed
from tenterhook.selection import Entry, Selection, resolve
from tenterhook.text_table import text_table

__all__ = ["HookSet", "hooks"]


class HookSet(ProcessHooks):
    """Hooks on one model; see :func:`tenterhook.hooks`."""

    def __init__(self, model: Any) -> None:
        self._backend: Backend = find_backend(model)
        self._backend.check(model)
        entries = self._backend.entries(model)
        self._model_name = type(entries[0].module).__name__
        self._waiting = model
        self._weak_entries = [(replace(entry, module=None), weakref.ref(entry.module)) for entry in entries]
        self._parameters = self._backend.parameters(model)
        self._weights = WeightUse(self._backend, model)
        self._gathering = Gathering(self._backend)
        self._handles: list[Handle] = []
        self._closed = False
        self._told, self._end = see_everything(self._backend, model)

    @property
    def _entries(self) -> list[Entry]:
        """The modules as they were when the set was opened; hooks keep no module alive, nor does their set."""
        if self._weak_entries[0][1]() is None:
            return []
        return [replace(entry, module=module) for entry, ref in self._weak_entries if (module := ref()) is not None]

    # --- registration ----------------------------------------------------------------------------------------------
    def forward_pre(
        self,
        select: Selection,
        fn: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        with_name: bool = False,
        prepend: bool = False,
        allow: str | Collection[str] = (),
    ) -> Handle:
        """Call ``fn(module, args)`` before each call of the selected modules.

        Args:
            select: which modules (see :mod:`tenterhook.selection`).
            fn: returns None, or the new positional arguments as a tuple (a bare tensor stands for a single one).
            with_kwargs: call ``fn(module, args, kwargs)``, which returns None or ``(args, kwargs)``.
            with_name: the module's path comes first: ``fn(name, module, args)``.
            prepend: run before the hooks that are on already.
            allow: what a replacement may change: ``"structure"``, ``"shape"``, ``"dtype"``, ``"device"``; ``"detached"``
                silences the warning about a replacement that cuts the graph, and the one about a change in place that
                is not differentiated.

        Raises:
            SelectionError: nothing matches, or a container that is never called is named.
            HookError: ``fn`` does not take these arguments.
        """
        names = _signature(with_name, "module", "args", *(["kwargs"] if with_kwargs else []))
        return self._register(
            "forward_pre", select, fn, names,
            lambda site: ForwardPreHook(self._backend, site, with_kwargs=with_kwargs, with_name=with_name, allow=allowed(allow)),
            prepend,
        )  # fmt: skip

    def forward(
        self,
        select: Selection,
        fn: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        with_name: bool = False,
        prepend: bool = False,
        always_call: bool = False,
        allow: str | Collection[str] = (),
    ) -> Handle:
        """Call ``fn(module, args, output)`` after each call of the selected modules.

        Args:
            select: which modules.
            fn: returns None, or a new output of the same structure, shapes, dtypes and devices.
            with_kwargs: call ``fn(module, args, kwargs, output)``.
            with_name: the module's path comes first.
            prepend: run before the hooks that are on already.
            always_call: run also where the call raised, with output None; the error of the call always wins.
            allow: what a replacement may change.

        Raises:
            SelectionError: nothing matches, or a container that is never called is named.
            HookError: ``fn`` does not take these arguments.
        """
        names = _signature(with_name, "module", "args", *(["kwargs"] if with_kwargs else []), "output")
        return self._register(
            "forward", select, fn, names,
            lambda site: ForwardHook(
                self._backend, site, with_kwargs=with_kwargs, with_name=with_name, always_call=always_call, allow=allowed(allow)
            ),
            prepend,
        )  # fmt: skip

    def backward_pre(
        self, select: Selection, fn: Callable[..., Any], *, with_name: bool = False, prepend: bool = False
    ) -> Handle:
        """Call ``fn(module, grad_output)`` when the gradients of a call's outputs are known.

        ``grad_output`` is a tuple with an entry for each output, which can also be asked by slot
        (``grad_output["[1][0]"]``); right with in-place layers, and with dict, dataclass and nested outputs. ``fn`` returns
        None, or new gradients.
        """
        return self._backward("backward_pre", select, fn, with_name, prepend)

    def backward(
        self, select: Selection, fn: Callable[..., Any], *, with_name: bool = False, prepend: bool = False
    ) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` when the backward pass through a call is over.

        ``grad_input`` holds the gradients *through this module* (what a tensor gets from elsewhere is not in it), with an
        entry for each input, which can also be asked by the parameter's name (``grad_input["x"]``), keyword inputs included.
        Where the module changes an input in place, it is the gradient of that tensor as it came, earlier uses of it included.
        The order nests, and is the same whether or not the model's input needs a gradient. ``fn`` returns None, or new
        gradients for the inputs. For the gradient of a tensor in total there is :meth:`tensor`.
        """
        return self._backward("backward", select, fn, with_name, prepend)

    def _backward(self, kind: str, select: Selection, fn: Callable[..., Any], with_name: bool, prepend: bool) -> Handle:
        names = _signature(with_name, "module", *(["grad_input"] if kind == "backward" else []), "grad_output")
        return self._register(
            kind,
            select,
            fn,
            names,
            lambda site: BackwardHook(self._backend, site, self._gathering, with_name=with_name),
            prepend,
        )

    def param_grad(self, select: Selection, fn: Callable[..., Any], *, accumulated: bool = False) -> Handle:
        """Call ``fn(name, gradient)`` once a backward pass for each selected parameter.

        Checkpointing with reentry runs a pass of its own for each region. Under it the callback comes at the end of the whole
        pass, with the sum of what a parameter got in all regions, and a new gradient is put into ``.grad`` then.

        Args:
            select: names of parameters: ``"*.weight"``, ``"**.bias"``, ``"features.0.weight"``.
            fn: returns None, or a new gradient.
            accumulated: give the running sum in ``.grad`` after this pass instead; it cannot be replaced.
        """
        entries = [
            Entry(path=one.name, module=one.parameter, aliases=one.aliases, type_names=(type(one.parameter).__name__,))
            for one in self._parameters
        ]
        modules = {entry.path: entry.module for entry in self._entries}
        users = {
            one.name: [modules.get(name.rpartition(".")[0]) for name in (one.name, *one.aliases)]
            for one in self._parameters
        }
        chosen = resolve(select, entries, what="parameter")
        check_signature(fn, ("name", "gradient"), "param_grad")
        sites = []
        for entry in chosen:
            site = HookSite("param_grad", entry.path, fn)
            site.parameter = weakref.ref(entry.module)
            tap = tap_parameter(
                self._backend,
                users[entry.path][0],
                entry.module,
                GradientHook(self._backend, site, site.path),
                accumulated=accumulated,
                looks_at=users[entry.path],
            )
            if isinstance(tap, str):
                site.reason = tap
            else:
                site.attached(tap)
            sites.append(site)
        return self._keep(Handle(sites))

    def tensor(self, tensor: Any, fn: Callable[[Any], Any]) -> Handle:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` is known; returns None, or a new gradient.

        Raises:
            HookError: ``tensor`` is none, or no gradient can come to it.
        """
        check_signature(fn, ("grad",), "tensor")
        if not isinstance(tensor, self._backend.tensor_types):
            raise HookError(f"hooks.tensor needs a tensor of {self._backend.name}, got {type(tensor).__name__}")
        site = HookSite("tensor", "(tensor)", fn)
        tap = self._backend.tap(tensor, GradientHook(self._backend, site))
        if isinstance(tap, str):
            raise HookError(
                f"no gradient comes to this tensor: {tap}\n  hook it where gradients are tracked, on a tensor that requires one"
            )
        site.attached(tap)
        return self._keep(Handle([site]))

    def _register(
        self,
        kind: str,
        select: Selection,
        fn: Callable[..., Any],
        names: tuple[str, ...],
        make: Callable[[HookSite], Any],
        prepend: bool,
    ) -> Handle:
        self._check_open()
        entries = self._entries
        if not entries:
            raise HookError(f"the {self._model_name} that these hooks are for is gone\n  keep a reference to the model")
        chosen = resolve(select, entries, require_callable=True, parameters=[one.name for one in self._parameters])
        check_signature(fn, names, kind)
        fn = without_cycle(fn, [entry.module for entry in entries])
        handle = Handle(())
        running = self._backend.running_modules()
        try:
            for entry in chosen:
                site = HookSite(kind, entry.path, fn)
                site.midway = any(one is entry.module for one in running)
                site.attached(make(site).attach(entry.module, first=prepend))
                handle.sites.append(site)
        except BaseException:
            handle.remove()
            raise
        return self._keep(handle)

    # --- the end ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Take off every hook of this set. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._waiting = None
        try:
            self._gathering.close()
            reasons = self._reasons()
            for site in self.sites:
                site.reason = reasons.why(site) or None
        finally:
            for handle in self._handles:
                handle.remove()
            self._end()

    remove = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- looking ---------------------------------------------------------------------------------------------------
    @property
    def sites(self) -> list[HookSite]:
        """All places with a hook of this set, in order of registration."""
        return [site for handle in self._handles for site in handle.sites]

    @property
    def fired(self) -> int:
        """How often callbacks of this set have run."""
        return sum(site.fired for site in self.sites)

    def why_not_fired(self, site: HookSite) -> str:
        """Say why a callback has not run; empty where it has."""
        return (site.reason or "") if self._closed else self._reasons().why(site)

    def _reasons(self) -> SiteReasons:
        return SiteReasons(self._backend, self._entries, self.sites, self._weights, self._gathering)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        rows = [("path", "kind", "function", "fired", "")]
        why = self._reasons().why if not self._closed else self.why_not_fired
        rows += [
            (
                site.path or "(root)",
                site.kind,
                name_of(site.fn),
                str(site.fired),
                why(site) or site.warning or ("" if site.live else "removed"),
            )
            for site in self.sites
        ]
        return f"hooks on {self._model_name}\n" + text_table(rows) + "".join(f"\n{line}" for line in self._told)

    def __repr__(self) -> str:
        return f"<HookSet on {self._model_name}: {len(self)} hooks, fired {self.fired} times, {'closed' if self._closed else 'open'}>"


def _signature(with_name: bool, *names: str) -> tuple[str, ...]:
    return ("name", *names) if with_name else names


def hooks(model: Any) -> HookSet:
    """Open a set of hooks on ``model``, best in a ``with`` statement: all of them come off at its end, however it ends.

    ```python
    with th.hooks(model) as hooks:
        hooks.forward("features.*", lambda module, args, output: print(output.shape))
        hooks.backward(nn.Conv2d, lambda module, grad_input, grad_output: ...)
        model(x).sum().backward()
    ```

    Callbacks have the frameworks' own signatures; one that returns None leaves the value alone, and what another returns
    takes its place. An :class:`~tenterhook.errors.EditError` refuses what cannot: another structure, shape, dtype or
    device, and the value of an earlier call that was left alone then, as ``store.setdefault(name, output)`` gives it back.
    ``print(hooks)`` shows each hook, how often it fired, and why it did not. Without a ``with``, ``hooks.close()`` takes them off;
    a set that is only dropped leaves its hooks on as long as there is the model, as the frameworks' own handles do.

    Raises:
        HookError: ``model`` is no module.
        UnsupportedError: it cannot be hooked (a script module).
    """
    return HookSet(model)
