"""Row 06, the other way round: what the user has put up to see what torch does sees the same with and without us."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tests.semantics.asking import ignore

KINDS = ["input", "output", "grad_output", "param", "param_grad", "update"]  # grad_input: see below


class Functions(TorchFunctionMode):
    """Logs every function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(
            f"{getattr(func, '__name__', func)} {getattr(getattr(func, '__self__', None), '__name__', '')}"
        )
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Logs every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Part(nn.Module):
    """A tuple, a view, a keyword, and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.act(self.l(x))
        return y[:, :2], {"whole": y * scale}


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b = Part(), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LayerNorm(3))

    def forward(self, x: Tensor) -> Tensor:
        short, named = self.a(x, scale=2.0)
        whole = named["whole"]
        if self.reentrant is not None:
            return short.sum() + checkpoint(self.b, whole, use_reentrant=self.reentrant).sum()
        return short.sum() + self.b(whole).sum()


@contextlib.contextmanager
def all_hooks(model: nn.Module) -> Iterator[None]:
    with th.hooks(model) as hooks:
        hooks.forward_pre("**", ignore, with_kwargs=True)
        hooks.forward("**", ignore)
        hooks.backward_pre("**", ignore)
        hooks.param_grad("**", lambda name, gradient: None)
        hooks.param_grad("**", lambda name, gradient: None, accumulated=True)
        hooks.optimizer_step(ignore)
        yield


@contextlib.contextmanager
def single_hooks(model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(th.register_forward_hook(module, ignore))
            stack.enter_context(th.register_backward_pre_hook(module, ignore))
        yield


@contextlib.contextmanager
def both(model: nn.Module) -> Iterator[None]:
    with th.record(model), all_hooks(model), th.record(model, ops=True):
        yield


SESSIONS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "recording": th.record,
    "recording all kinds": lambda model: th.record(model, kinds=KINDS, tensors=True, on_error="raise"),
    "recording gradients of parameters": lambda model: th.record(model, kinds=["param_grad", "update"]),
    "recording ops": lambda model: th.record(model, ops=True, on_error="raise"),
    "recording aliases": lambda model: th.record(model, tensors=True, alias=True, on_error="raise"),
    "recording on other steps": lambda model: th.record(model, every=2),
    "recording without statistics": lambda model: th.record(model, stats=None),
    "hooks": all_hooks,
    "single hooks": single_hooks,
    "both": both,
}


def run(
    mode: Any,
    session: Callable[[nn.Module], AbstractContextManager[Any]],
    *,
    inside: bool = False,
    reentrant: bool | None = None,
) -> tuple[list[str], list[Tensor]]:
    """What a mode sees of two steps of training, with the session around it or inside it; and what comes out."""
    torch.manual_seed(0)
    model = Net(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 3, requires_grad=True)
    with contextlib.ExitStack() as stack:
        if inside:
            stack.enter_context(mode)
        stack.enter_context(session(model))
        if not inside:
            stack.enter_context(mode)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    assert x.grad is not None
    return mode.seen, [x.grad, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("inside", [False, True], ids=["session outside", "session inside"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("mode", [Functions, Operators])
@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_a_mode_sees_what_it_sees_without_a_session(
    session: Callable[[nn.Module], AbstractContextManager[Any]],
    mode: Callable[[], Any],
    reentrant: bool | None,
    inside: bool,
) -> None:
    """Row 69: call for call, attribute for attribute, in the same order."""
    bare, expected = run(mode(), lambda model: contextlib.nullcontext(), reentrant=reentrant)
    seen, result = run(mode(), session, inside=inside, reentrant=reentrant)
    assert seen == bare
    assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_aliases_of_inputs_are_seen_in_the_backward_pass_only(reentrant: bool | None) -> None:
    """Row 69, same kind: where grad_input is asked for, modules are given aliases of their inputs, which are differentiated, too."""
    bare, _ = run(Functions(), lambda model: contextlib.nullcontext(), reentrant=reentrant)
    operators, _ = run(Operators(), lambda model: contextlib.nullcontext(), reentrant=reentrant)
    for session in (lambda model: th.record(model, kinds=["grad_input"]), backward_hooks):
        assert run(Functions(), session, reentrant=reentrant)[0] == bare
        seen = run(Operators(), session, reentrant=reentrant)[0]
        missing = [operator for operator in set(operators) if seen.count(operator) < operators.count(operator)]
        assert missing == []
        extra = {operator for operator in set(seen) if seen.count(operator) > operators.count(operator)}
        assert extra <= {f"aten.{name}.default" for name in ALIASES}


ALIASES = ("view", "as_strided", "copy_", "clone", "new_zeros", "new_empty_strided", "detach")  # of views, backward


@contextlib.contextmanager
def backward_hooks(model: nn.Module) -> Iterator[None]:
    with th.hooks(model) as hooks:
        hooks.backward("**", ignore)
        yield


def test_what_a_callback_does_is_seen_as_it_is_in_torch() -> None:
    """Row 69, same kind: the mode is the user's, and so is the callback."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def callback(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.square().mul(2)

    def seen(register: Callable[[], AbstractContextManager[Any]]) -> list[list[str]]:
        logs: list[list[str]] = []
        for mode in (Functions(), Operators()):
            with register(), mode:
                model(torch.ones(1, 2)).sum().backward()
            logs.append(mode.seen)
        return logs

    def ours() -> AbstractContextManager[Any]:
        hooks = th.hooks(model)
        hooks.forward("0", callback)
        return hooks

    assert seen(ours) == seen(lambda: model[0].register_forward_hook(callback))


def test_an_edit_adds_its_own_operations_and_no_others() -> None:
    """Row 69, same kind: what changes a value is a part of the run."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with Functions() as bare:
        model(torch.ones(1, 2)).sum().backward()
    with th.edit(model) as edit:
        edit.output("0", lambda value: value * 2)
        with Functions() as mode:
            model(torch.ones(1, 2)).sum().backward()
    added = Counter(mode.seen) - Counter(bare.seen)
    assert [(name.strip(), count) for name, count in added.items()] == [("mul", 1)]
    assert not Counter(bare.seen) - Counter(mode.seen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_modes_are_on_again_after_an_error(error: type[BaseException]) -> None:
    """Row 69, same kind: in the model, and in a callback."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    def fail(*arguments: Any) -> None:
        raise error

    x = torch.ones(1, 2)
    for mode in (Functions(), Operators()):
        with th.record(failing := nn.Sequential(Failing())), mode, pytest.raises(error):
            failing(x)
        with th.hooks(fine := nn.Sequential(nn.Tanh())) as hooks:
            hooks.forward("0", fail)
            with mode:
                with pytest.raises(error):
                    fine(x)
                before = len(mode.seen)
                torch.add(x, x)
                assert len(mode.seen) == before + 1


def test_a_mode_that_the_model_switches_on_itself() -> None:
    """Row 69, same kind: inside of a module's forward, where the calls of the modules in it take the shortest way."""
    mode = Functions()

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            with mode:
                return self.inner(x)

    model, x = Watching(), torch.ones(1, 2)
    model(x).sum().backward()
    bare, mode.seen = mode.seen, []
    for name, session in SESSIONS.items():
        with session(model):
            model(x).sum().backward()
        assert (name, mode.seen) == (name, bare)
        mode.seen = []
