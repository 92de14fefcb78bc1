"""Row 25: what a model puts on itself in the middle of a call runs from when it would run without a session, and not before."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registries
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import tenterhook as th
from tenterhook.script_recorder import ScriptRecorder, ScriptRequest
from tests.semantics.asking import ignore
from tests.semantics.nets import Boom
from tests.semantics.self_hooking import PROGRAMS, Acting, Hook, Log, once, run

# ---- the sessions under which a program runs ----


def bare(model: nn.Module, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def all_hooks(model: nn.Module, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    hooks = th.hooks(model)
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        getattr(hooks, kind)("**", ignore)
    return hooks


def only_before(model: nn.Module, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    hooks = th.hooks(model)
    hooks.forward_pre("**", ignore)
    return hooks


def always(model: nn.Module, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    hooks = th.hooks(model)
    hooks.forward("**", lambda *_: None, always_call=True)
    return hooks


@contextlib.contextmanager
def single(model: nn.Module, tmp_path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(th.register_forward_hook(module, ignore))
        yield


def edit(model: nn.Module, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    edit = th.edit(model)
    edit.output("**", lambda value: None)
    return edit


def record(model: nn.Module, tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    return th.record(model, kinds=["input", "output", "grad_output"])


@contextlib.contextmanager
def record_in_python(model: nn.Module, tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
        with record(model, tmp_path):
            yield


@contextlib.contextmanager
def record_that_gave_way(model: nn.Module, tmp_path: Path) -> Iterator[None]:
    with record(model, tmp_path):
        for module in model.modules():
            module.register_forward_hook(ignore).remove()
        yield


@contextlib.contextmanager
def record_and_hooks(model: nn.Module, tmp_path: Path) -> Iterator[None]:
    with record(model, tmp_path), all_hooks(model, tmp_path), record(model, tmp_path):
        yield


@contextlib.contextmanager
def script(model: nn.Module, tmp_path: Path) -> Iterator[None]:
    recorder = ScriptRecorder(tmp_path / "script.thk", ScriptRequest())
    recorder.start()
    try:
        yield
    finally:
        recorder.close()


SESSIONS = (
    all_hooks, only_before, always, single, edit, record, record_in_python, record_that_gave_way, record_and_hooks, script,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_hooks_on_all_modules() -> Iterator[None]:
    yield
    for table in (registries._global_forward_hooks, registries._global_forward_pre_hooks):
        table.clear()


def _seen(make: Callable[[Log], nn.Module], session: Any, tmp_path: Path) -> Log:
    log: Log = []
    model = make(log)
    with session(model, tmp_path):
        for _ in range(3):
            run(model, log)
    run(model, log)
    for table in (registries._global_forward_hooks, registries._global_forward_pre_hooks):
        log.append(len(table))
        table.clear()
    return log


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_that_puts_hooks_on_itself_runs_as_without_a_session(name: str, session: Any, tmp_path: Path) -> None:
    """Row 25: torch looks for hooks after ``forward`` only where the call began with one."""
    bare_log = _seen(PROGRAMS[name], bare, tmp_path)
    assert _seen(PROGRAMS[name], session, tmp_path) == bare_log


def _sets(model: nn.Module) -> list[list[Any]]:
    return [list(module._forward_hooks.values()) for module in model.modules()]


@pytest.mark.parametrize("error", [None, Boom(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_the_table_has_the_very_hook_when_the_call_has_ended(error: BaseException | None) -> None:
    """Row 25, same kind: what stands in for it during the call goes with the call, however that ends."""

    def act(module: Acting, depth: int) -> None:
        handles.append(module.register_forward_hook(hook))
        if error is not None:
            raise error

    handles: list[Any] = []
    hook = Hook([], "own")
    model = Acting(act)
    with th.hooks(model) as hooks:
        hooks.forward("", ignore)
        with contextlib.suppress(Boom, KeyboardInterrupt):
            model(torch.ones(1))
        if error is not None:  # its traceback keeps all of the call
            model.act = ignore
            model(torch.ones(1))
        assert model._forward_hooks[handles[0].id] is hook
    assert _sets(model) == [[hook]]


def test_the_table_has_the_very_hook_when_the_session_has_ended() -> None:
    """Row 24: also where the error of the call in which it came is kept, and nothing was called since."""
    model = Acting(once(raise_after_registering))
    with th.hooks(model) as hooks, pytest.raises(Boom) as raised:
        hooks.forward("", ignore)
        model(torch.ones(1))
    assert raised.tb is not None and _sets(model) == [[label]]


def raise_after_registering(module: nn.Module) -> None:
    module.register_forward_hook(label)
    raise Boom


def test_a_session_that_ends_in_the_call_leaves_the_very_hook() -> None:
    """Row 25, same kind: the stand-in outlives the session by the rest of the call."""

    def act(module: Acting, depth: int) -> None:
        module.register_forward_hook(hook)
        hooks.remove()

    log: Log = []
    hook = Hook(log, "own")
    model = Acting(act)
    hooks = th.hooks(model)
    hooks.forward("", ignore)
    assert model(torch.ones(1)).tolist() == [2.0]
    assert _sets(model) == [[hook]] and not log


def test_what_is_made_of_the_model_during_the_call_has_the_hook() -> None:
    """Row 25, same kind: copies, pickles and the list of hooks know nothing of a stand-in."""

    def act(module: Acting, depth: int) -> None:
        if module.again == 0:
            module.again = 1
            module.register_forward_hook(label)
            made.append(copy.deepcopy(module._forward_hooks))
            made.append(pickle.loads(pickle.dumps(module._forward_hooks)))
            made.extend(row for row in th.installed_hooks(module) if row.function == "label")

    made: list[Any] = []
    model = Acting(act)
    with th.hooks(model) as hooks:
        hooks.forward_pre("", ignore)
        model(torch.ones(1))
    copied, pickled, row = made
    for table in (copied, pickled):
        assert list(table.values())[-1] is label
    assert (row.function, row.owner, row.hook) == ("label", "tests", label)


def label(module: nn.Module, args: Any, output: Any) -> None:
    return None


@pytest.mark.parametrize("begun", [False, True], ids=["begins after it", "has begun before it"])
@pytest.mark.parametrize("session", [all_hooks, record_in_python, record])
def test_a_hook_put_on_by_another_thread(session: Any, begun: bool, tmp_path: Path) -> None:
    """Row 25, same kind: a call that runs in one thread does not get the hook that another one puts on."""

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert put.wait(20)
            return x * 2

    def seen(session: Any) -> list[Any]:
        inside.clear()
        put.clear()
        model = Waits()
        results: list[Any] = []
        with session(model, tmp_path):
            thread = threading.Thread(target=lambda: results.append(model(torch.ones(1)).tolist()))
            if begun:
                thread.start()
                assert inside.wait(20)
            model.register_forward_hook(lambda module, args, output: output * 10)
            put.set()
            if not begun:
                thread.start()
            thread.join()
            results.append(model(torch.ones(1)).tolist())
        return results

    inside, put = threading.Event(), threading.Event()
    assert seen(session) == seen(bare) == [[2.0] if begun else [20.0], [20.0]]


def test_the_functions_that_are_looked_at_are_put_back() -> None:
    """Row 65: also those that were imported by name."""

    def state() -> list[Any]:
        functions = [register_module_forward_hook, register_module_forward_pre_hook]
        methods = [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook, handle.remove]
        return [*((one.__code__, one.__kwdefaults__) for one in functions), *methods]

    handle = torch.utils.hooks.RemovableHandle
    before = state()
    model = nn.ReLU()
    with th.hooks(model), th.record(model):
        assert state() != before
    assert state() == before


@pytest.mark.parametrize("globally", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["ends", "ends, and another begins"])
@pytest.mark.parametrize("session", [all_hooks, edit, record_in_python, script])
def test_a_session_that_ends_in_the_call_before_the_hook_comes(
    session: Any, again: bool, globally: bool, tmp_path: Path
) -> None:
    """Row 25, same kind: the call still looks into the tables when nothing of ours is in them any more."""

    def seen(session: Any) -> Log:
        def act(module: Acting, depth: int) -> None:
            stack.close()
            if again:
                stack.enter_context(session(model, tmp_path / "again"))
            hook = Hook(log, "own")
            handles.append(register_module_forward_hook(hook) if globally else module.register_forward_hook(hook))

        log: Log = []
        handles: list[Any] = []
        model = nn.Sequential(nn.ReLU(), nn.Sequential(Acting(once(lambda module: (act(module, 0), True))), nn.Tanh()))
        with contextlib.ExitStack() as stack:
            stack.enter_context(session(model, tmp_path))
            for _ in range(2):
                run(model, log)
        run(model, log)
        handles[0].remove()
        return log

    (tmp_path / "again").mkdir()
    before = nn.Module.register_forward_hook, register_module_forward_hook.__code__
    assert seen(session) == seen(bare)
    assert (nn.Module.register_forward_hook, register_module_forward_hook.__code__) == before


def test_what_looks_on_ends_with_a_call_whose_error_is_kept() -> None:
    """Row 65: at the latest when the next hook is put on, or the next session ends."""

    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hooks.remove()
            raise Boom

    before = nn.Module.register_forward_hook
    model = Ends()
    hooks = th.hooks(model)
    hooks.forward("", ignore)
    with pytest.raises(Boom) as raised:
        model(torch.ones(1))
    nn.ReLU().register_forward_hook(ignore)
    assert raised.tb is not None and nn.Module.register_forward_hook is before
