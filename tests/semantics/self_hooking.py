"""Models that put hooks on themselves in the middle of their calls, and what such a run has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.semantics.asking import ignore
from tests.semantics.nets import Boom

__all__ = ["PROGRAMS", "Acting", "Hook", "Log", "once", "run"]

Log = list[Any]


class Acting(nn.Module):
    """Does what it is told to in its forward, and is otherwise a module as any."""

    def __init__(self, act: Callable[[Acting, int], None], inner: nn.Module | None = None, again: int = 0) -> None:
        super().__init__()
        self.act = act
        self.inner = inner
        self.again = again
        self.depth = 0
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, plus: float = 0.0) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        self.act(self, self.depth)
        if self.depth < self.again:
            self.depth += 1
            try:
                x = self(x)
            finally:
                self.depth -= 1
        return x * self.scale + plus


# ---- programs: each returns what it has seen ----


def run(model: nn.Module, log: Log, x: float = 1.0, **kwargs: Any) -> None:
    """One call with its gradient; what is on the tables afterwards belongs to what is seen."""
    value = torch.tensor([x], requires_grad=True)
    try:
        output = model(value, **kwargs)
        output.sum().backward()
        log.append(("ran", output.tolist(), None if value.grad is None else value.grad.tolist()))
    except Boom:
        log.append("raised")
    for module in model.modules():
        tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        log.append(
            [[getattr(hook, "label", None) for hook in table.values() if hasattr(hook, "label")] for table in tables]
        )


class Hook:
    """A callback of the model's own: notes that it ran, and changes what flows where it can."""

    def __init__(self, log: Log, label: str, changes: bool = True) -> None:
        self.log = log
        self.label = label
        self.changes = changes

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        self.log.append((self.label, len(given), given[-1] is None))
        last = given[-1]
        return last * 10 if self.changes and isinstance(last, Tensor) else None


def once(register: Callable[[Acting], Any]) -> Callable[[Acting, int], None]:
    """Put a hook on in the first call that begins."""
    handles: list[Any] = []

    def act(module: Acting, depth: int) -> None:
        if not handles:
            handles.append(register(module))

    return act


OPTIONS = {
    "plain": {},
    "with_kwargs": {"with_kwargs": True},
    "prepend": {"prepend": True},
    "always_call": {"always_call": True},
    "all": {"with_kwargs": True, "prepend": True, "always_call": True},
}


def forward(options: dict[str, bool]) -> Callable[[Log], nn.Module]:
    return lambda log: Acting(once(lambda module: module.register_forward_hook(Hook(log, "own"), **options)))


def pre(log: Log) -> nn.Module:
    return Acting(once(lambda module: module.register_forward_pre_hook(Hook(log, "pre"))))


def backward(log: Log) -> nn.Module:
    return Acting(once(lambda module: module.register_full_backward_hook(Hook(log, "backward"))))


def backward_pre(log: Log) -> nn.Module:
    return Acting(once(lambda module: module.register_full_backward_pre_hook(Hook(log, "backward_pre"))))


def backward_and_forward(log: Log) -> nn.Module:
    def both(module: Acting) -> None:
        module.register_full_backward_hook(Hook(log, "backward"))
        module.register_forward_pre_hook(Hook(log, "pre"))
        module.register_forward_hook(Hook(log, "own"))
        module.register_forward_hook(Hook(log, "own 2"), prepend=True)

    return Acting(once(lambda module: (both(module), True)))


def nested(log: Log) -> nn.Module:
    return nn.Sequential(nn.Sequential(forward({})(log), nn.ReLU()), forward({"prepend": True})(log))


def on_the_parent(log: Log) -> nn.Module:
    inner = Acting(once(lambda module: outer.register_forward_hook(Hook(log, "on the parent"))))
    outer = Acting(ignore, inner)
    return _loose(outer)


def _loose(outer: nn.Module) -> nn.Module:
    return outer


def on_the_child(log: Log) -> nn.Module:
    return Acting(once(lambda module: module.inner.register_forward_hook(Hook(log, "on the child"))), Acting(ignore))


def recursive(log: Log) -> nn.Module:
    return Acting(once(lambda module: module.register_forward_hook(Hook(log, "own"))), again=2)


def recursive_inside(log: Log) -> nn.Module:
    register = once(lambda module: module.register_forward_hook(Hook(log, "own"), with_kwargs=True))
    return Acting(lambda module, depth: register(module, depth) if depth == 1 else None, again=2)


def raising(always_call: bool) -> Callable[[Log], nn.Module]:
    def make(log: Log) -> nn.Module:
        def register(module: Acting) -> None:
            module.register_forward_hook(Hook(log, "own"), always_call=always_call)
            raise Boom

        handles: list[int] = []

        def act(module: Acting, depth: int) -> None:
            if not handles:
                handles.append(1)
                register(module)

        return Acting(act)

    return make


def removed_again(log: Log) -> nn.Module:
    def act(module: Acting, depth: int) -> None:
        handle = module.register_forward_hook(Hook(log, "gone"))
        module.register_forward_hook(Hook(log, "stays"), prepend=True)
        handle.remove()

    return Acting(act)


def as_context(log: Log) -> nn.Module:
    def act(module: Acting, depth: int) -> None:
        with module.register_forward_hook(Hook(log, "gone")):
            pass

    return Acting(act)


def after_a_hook_that_was_there(log: Log) -> nn.Module:
    """torch looks into the tables then, and finds the new one."""
    model = forward({})(log)
    model.register_forward_pre_hook(Hook(log, "pre"))
    return model


def after_one_that_removed_itself(kind: str) -> Callable[[Log], nn.Module]:
    def make(log: Log) -> nn.Module:
        model = forward({})(log)

        def gone(*_: Any) -> None:
            handle.remove()

        handle = getattr(model, kind)(gone)
        return model

    return make


def after_one_that_the_model_removes(kind: str) -> Callable[[Log], nn.Module]:
    def make(log: Log) -> nn.Module:
        def register(module: Acting) -> None:
            handle.remove()
            module.register_forward_hook(Hook(log, "own"))

        model = Acting(once(lambda module: (register(module), True)))
        handle = getattr(model, kind)(Hook(log, "there", changes=False))
        return model

    return make


def after_one_for_all_that_is_removed(log: Log) -> nn.Module:
    def register(module: Acting) -> None:
        handle.remove()
        module.register_forward_hook(Hook(log, "own"))

    handle = register_module_forward_pre_hook(lambda module, args: log.append(type(module).__name__))
    return nn.Sequential(Acting(once(lambda module: (register(module), True))), nn.ReLU())


def for_all(log: Log) -> nn.Module:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        log.append(("all", type(module).__name__))
        return output + 1

    def act(module: Acting, depth: int) -> None:
        handles.append(register_module_forward_hook(hook))

    def after(module: Acting, depth: int) -> None:
        if len(handles) > 1:
            for handle in handles:
                handle.remove()

    handles: list[Any] = []
    return nn.Sequential(nn.ReLU(), nn.Sequential(Acting(act), nn.Tanh()), Acting(after), nn.ReLU())


def for_all_before(log: Log) -> nn.Module:
    def hook(module: nn.Module, args: Any) -> None:
        log.append(("all", type(module).__name__))

    def act(module: Acting, depth: int) -> None:
        handle = register_module_forward_pre_hook(hook)
        module.register_forward_hook(Hook(log, "own"))
        nn.ReLU()(torch.ones(1))
        handle.remove()
        module.register_forward_hook(Hook(log, "own 2"))

    return nn.Sequential(Acting(act), nn.ReLU())


PROGRAMS: dict[str, Callable[[Log], nn.Module]] = {
    **{f"forward {name}": forward(options) for name, options in OPTIONS.items()},
    "pre": pre,
    "backward": backward,
    "backward_pre": backward_pre,
    "all kinds": backward_and_forward,
    "nested": nested,
    "parent": on_the_parent,
    "child": on_the_child,
    "recursive": recursive,
    "recursive inside": recursive_inside,
    "raises": raising(False),
    "raises, always": raising(True),
    "removed": removed_again,
    "context": as_context,
    "beside another": after_a_hook_that_was_there,
    **{
        f"{what.__name__} {kind}": what(kind)
        for what in (after_one_that_removed_itself, after_one_that_the_model_removes)
        for kind in ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook")
        if what is after_one_that_the_model_removes or kind == "register_forward_pre_hook"
    },
    "one for all is removed": after_one_for_all_that_is_removed,
    "all": for_all,
    "all, before": for_all_before,
}
