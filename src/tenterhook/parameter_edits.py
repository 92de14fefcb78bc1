"""Edits of the gradients of parameters: one by one as they come, or together right before the optimizer steps."""

from __future__ import annotations

from functools import partial
from typing import Any

from tenterhook.address import Address, Kind
from tenterhook.edit_handle import EditHandle
from tenterhook.editing import ModuleEdit, Session
from tenterhook.handles import HookSite
from tenterhook.model_ref import ModelRef
from tenterhook.parameters import tap_parameter

__all__ = ["put_on_parameters"]


def put_on_parameters(session: Session, model: ModelRef, handle: EditHandle) -> None:
    """Put an edit on the parameters that it names; why that cannot be is noted at its sites."""
    if handle.together:
        _together(session, model, handle)
        return
    parameters = {one.name: one.parameter for one in model.parameters()}
    modules = {entry.path: entry.module for entry in model.entries()}
    for site in handle.sites:
        path, _, name = site.path.rpartition(".")
        if site.path not in parameters:
            site.reason = "the parameter is gone since the edit was registered"
            continue
        arrived = partial(_arrived, ModuleEdit(session, handle.rule, site), path, name)
        tap = tap_parameter(session.backend, modules.get(path), parameters[site.path], arrived, edits=True)
        if isinstance(tap, str):
            site.reason = f"no gradient: {tap}"
        else:
            site.attached(tap)


def _arrived(edit: ModuleEdit, path: str, name: str, gradient: Any) -> Any:
    step = edit.session.tracker.step
    edit.site.calls += 1
    if not edit.rule.matches(None, step):
        return None
    return edit.gradient("", Address(path, Kind.PARAM_GRAD, name, step=step), gradient)


def _together(session: Session, model: ModelRef, handle: EditHandle) -> None:
    site: HookSite = handle.sites[0]
    wanted = set(handle.together)

    def before_step(optimizer: Any) -> None:
        if site.live and handle.rule.matches(None, session.tracker.step):
            site.fired += 1
            chosen = [one.parameter for one in model.parameters() if one.name in wanted]
            session.backend.clip_together(chosen, handle.rule.value.options["max_norm"])

    site.attached(session.backend.on_optimizer_step(before_step, before=True))
