"""A fixture that fails every test after which a hook of ours, or a changed switch of a framework, is left behind.

Three things are looked at, since each alone misses something:

- the switches and registries that are global to a framework or to the interpreter, before and after;
- the hooks that tenterhook put on during the test, through the handles that the frameworks make for them: this sees
  the hooks of a model that is gone by the time the test is over;
- the models that the test made and that still live: this sees what was put on past the frameworks' handles.

A framework that is not loaded costs nothing.
"""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import pytest

__all__ = ["no_hooks_left"]

_OURS = "tenterhook"


@pytest.fixture(autouse=True)
def no_hooks_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if it leaves a hook, a patched function or a changed switch behind."""
    placed: list[_Placed] = []
    _watch_handles(monkeypatch, placed)
    before = _global_state()
    gc.freeze()  # so that get_objects() afterwards gives what the test made, and not a quarter of a million others
    try:
        yield
        leaks = [*_changes(before, _global_state()), *_still_placed(placed), *_on_live_models()]
        gc.collect()  # the test's own garbage only: with the rest frozen this takes no time
    finally:
        gc.unfreeze()
    if leaks:
        pytest.fail("left behind by this test:\n" + "\n".join(f"  {leak}" for leak in leaks), pytrace=False)


# ---- global state ----


def _global_state() -> dict[str, object]:
    """Everything global that a hook may hang on, by a name that a person can act on."""
    state: dict[str, object] = {
        "sys.settrace": sys.gettrace(),
        "sys.setprofile": sys.getprofile(),
        "threading.settrace": threading.gettrace(),
        "threading.setprofile": threading.getprofile(),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "sys.meta_path": [finder for finder in sys.meta_path if _is_ours(finder)],
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state |= _torch_state(torch)
    mindspore: Any = sys.modules.get("mindspore")
    if mindspore is not None:
        state |= _functions("mindspore.nn.Cell", mindspore.nn.Cell)
        api = sys.modules["mindspore.graph.api"]
        for owner in (api._PyNativeExecutor, api._JitExecutor):
            state |= _functions(f"{api.__name__}.{owner.__name__}", owner)
        for name in ("mindspore.ops.composite.base", "mindspore.ops.function.grad.grad_func"):
            state |= {
                f"{name}.{key}": value for key, value in vars(sys.modules[name]).items() if key.startswith("_pynative")
            }
    return state


def _torch_state(torch: Any) -> dict[str, object]:
    state: dict[str, object] = {
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch.backends.mha fast path": torch.backends.mha.get_fastpath_enabled(),
        "torch grad mode": torch.is_grad_enabled(),
        "torch inference mode": torch.is_inference_mode_enabled(),
        "torch anomaly mode": torch.is_anomaly_enabled(),
        "torch default dtype": torch.get_default_dtype(),
        "CheckpointFunction.forward": vars(importlib.import_module("torch.utils.checkpoint").CheckpointFunction)[
            "forward"
        ],
        "torch.jit._recursive.create_script_module": torch.jit._recursive.create_script_module,
        "torch deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    for module in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"]):
        for name, value in vars(module).items():
            if name.startswith("_global_"):
                state[f"{module.__name__}.{name}"] = dict(value) if isinstance(value, Mapping) else value
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None:
        state["torch.compiler stance"] = vars(eval_frame)["_stance"].stance
    importlib.import_module("torch.utils.checkpoint")  # older releases do not load it by themselves
    for path in ("nn.Module", "nn.functional", "Tensor", "optim.Optimizer", "autograd", "utils.checkpoint"):
        state |= _functions(f"torch.{path}", operator.attrgetter(path)(torch))
    return state


def _functions(name: str, owner: Any) -> dict[str, object]:
    """The functions of a class or module, each of which somebody may have replaced."""
    return {f"{name}.{attribute}": value for attribute, value in vars(owner).items() if callable(value)}


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    for name, value in after.items():
        if name in before:
            was = before[name]
            if was is not value and (callable(was) or callable(value) or was != value):
                yield f"{name}: was {was!r}, is {value!r}"
        elif name.rpartition(".")[2].startswith("_global_") and value:
            yield f"{name}: {value!r}"  # the framework was loaded by the test: its registries begin empty


# ---- hooks put on through the frameworks' handles ----


class _Placed(NamedTuple):
    what: str
    hooks: Mapping[int, object]  # the owner's dictionary itself: it outlives the owner here
    key: int


def _watch_handles(monkeypatch: pytest.MonkeyPatch, placed: list[_Placed]) -> None:
    for module, name, key in (
        ("torch.utils.hooks", "RemovableHandle", "id"),
        ("mindspore.common.hook_handle", "HookHandle", "handle_id"),
    ):
        if module in sys.modules:
            handle = getattr(sys.modules[module], name)
            monkeypatch.setattr(handle, "__init__", _watching(handle.__init__, key, placed))


def _watching(init: Callable[..., None], key: str, placed: list[_Placed]) -> Callable[..., None]:
    @functools.wraps(init)
    def watching(self: Any, hooks: Any = None, **keywords: Any) -> None:
        init(self, hooks, **keywords)
        frame = sys._getframe(1)
        owner = frame.f_locals.get("self")
        method, hook = frame.f_code.co_name, frame.f_locals.get("hook", frame.f_locals.get("hook_fn"))
        caller = frame.f_back
        while caller is not None and (
            _framework(caller.f_globals.get("__name__", ""))
            or caller.f_code.co_name
            == "registering"  # ours, that only looks on while others register (backends/_torch_registering.py)
        ):
            caller = caller.f_back
        by_us = caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == _OURS
        if hooks is None or owner is None or not (by_us or _is_ours(hook)) or _dies_with_its_graph(owner):
            return
        placed.append(_Placed(f"{type(owner).__name__}.{method}({_name(hook)})", hooks, getattr(self, key)))

    return watching


def _framework(module: str) -> bool:
    return module.partition(".")[0] in {"torch", "mindspore"}


def _dies_with_its_graph(owner: object) -> bool:
    """True of a tensor that an operation made: a hook on it goes when the graph goes, and is no leak."""
    return getattr(owner, "is_leaf", True) is False


def _still_placed(placed: list[_Placed]) -> Iterator[str]:
    for what, hooks, key in placed:
        if key in hooks:
            yield f"{what}: never removed"


# ---- models that still live ----


def _on_live_models() -> Iterator[str]:
    bases = tuple(
        base
        for base in (
            getattr(sys.modules.get("torch.nn.modules.module"), "Module", None),
            getattr(sys.modules.get("mindspore.nn.cell"), "Cell", None),
        )
        if base is not None
    )
    if not bases:
        return
    for model in gc.get_objects():
        if not issubclass(type(model), bases):  # isinstance would run __class__ of lazy objects, which may warn
            continue
        attributes = vars(model)
        for name, hooks in attributes.items():
            if "hook" in name and isinstance(hooks, Mapping):
                for hook in hooks.values():
                    if _is_ours(hook):
                        yield f"{type(model).__name__}.{name}: {_name(hook)}"
        for name in ("forward", "construct", "__call__", "_compiled_call_impl"):
            if _is_ours(attributes.get(name)):
                yield f"{type(model).__name__}.__dict__[{name!r}]: {_name(attributes[name])}"


# ---- whose is it ----


def _is_ours(thing: object, depth: int = 4) -> bool:
    """Whether a callable was made by tenterhook, or wraps or closes over one that was."""
    if thing is None or depth == 0:
        return False
    modules = (type(thing).__module__, getattr(thing, "__module__", None))
    if any(isinstance(module, str) and module.partition(".")[0] == _OURS for module in modules):
        return True
    return any(_is_ours(inner, depth - 1) for inner in _inside(thing))


def _inside(thing: Any) -> Iterator[object]:
    if isinstance(thing, functools.partial):
        yield thing.func
        yield from thing.args
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, FunctionType):
        yield from (_content(cell) for cell in thing.__closure__ or ())
    elif type(thing).__module__.partition(".")[0] == "wrapt" and hasattr(thing, "_self_wrapper"):
        yield from (thing._self_wrapper, thing.__wrapped__)
    elif type(thing).__name__ == "_WrappedHook":  # torch's own wrapper around state_dict hooks
        yield thing.hook
    elif isinstance(thing, tuple):
        yield from thing


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set
        return None


def _name(hook: object) -> str:
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
