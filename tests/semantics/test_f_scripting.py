"""Row 18: a model is made into a script while hooks of ours are on it."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.asking import forward_paths, ignore, missing
from tests.semantics.nets import HOOK_TABLES

KINDS = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
X = torch.ones(3, 2)


@pytest.fixture(autouse=True)
def old_script() -> Iterator[None]:
    """TorchScript, whose deprecation torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "edits that never ran")
        yield


@contextlib.contextmanager
def all_hooks(model: nn.Module) -> Iterator[None]:
    with th.hooks(model) as hooks:
        hooks.forward_pre("**", ignore)
        hooks.forward("**", ignore)
        hooks.backward_pre("**", ignore)
        hooks.backward("**", ignore)
        hooks.param_grad("**", lambda name, gradient: None)
        hooks.load(ignore)
        yield


@contextlib.contextmanager
def edits(model: nn.Module) -> Iterator[None]:
    with th.edit(model) as edit:
        edit.output("**", th.edits.scale(1.0))
        edit.grad_input("**", th.edits.scale(1.0))
        edit.skip("1")
        yield


@contextlib.contextmanager
def single_hooks(model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (one for one in model.modules() if not isinstance(one, nn.ModuleList)):
            stack.enter_context(th.register_forward_pre_hook(module, ignore))
            stack.enter_context(th.register_forward_hook(module, ignore))
            stack.enter_context(th.register_backward_hook(module, ignore))
        yield


@contextlib.contextmanager
def hook_point(model: nn.Module) -> Iterator[None]:
    point = th.HookPoint("somewhere")
    with point.register(ignore), th.record(model):
        yield


SESSIONS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "recording": th.record,
    "recording all kinds": lambda model: th.record(model, kinds=KINDS, tensors=True),
    "recording ops": lambda model: th.record(model, ops=True),
    "recording, fused kept": lambda model: th.record(model, fused="keep"),
    "hooks": all_hooks,
    "edits": edits,
    "single hooks": single_hooks,
    "hook point": hook_point,
}


class Block(nn.Module):
    """With a list of children, a method that a trace exports, and more arguments than one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(inplace=True)])

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.scaled(x) * scale

    @torch.jit.export
    def scaled(self, x: Tensor) -> Tensor:
        return x * 3


class Shared(nn.Module):
    """Calls one module twice, and gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)
        self.same = self.l

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.l(x)
        return y, self.same(y)


NETS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
    "in place": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)),
    "block": lambda: nn.Sequential(Block(), nn.Identity()),
    "shared": lambda: nn.Sequential(nn.Identity(), nn.Identity(), Shared()),
}


def bytes_of(scripted: Any) -> bytes:
    stored = io.BytesIO()
    torch.jit.save(scripted, stored)
    return stored.getvalue()


def tables(model: nn.Module) -> list[Any]:
    """Every hook on the modules, in order."""
    return [list(getattr(module, table).items()) for module in model.modules() for table in HOOK_TABLES] + [
        vars(module).get("_compiled_call_impl") for module in model.modules()
    ]


def is_bare(scripted: nn.Module) -> bool:
    ours = [
        value
        for module in scripted.modules()
        for name, value in vars(module).items()
        if type(value).__module__.startswith("tenterhook")
    ]
    return not ours and not any(getattr(module, table) for module in scripted.modules() for table in HOOK_TABLES[:4])


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_a_script_made_inside_a_session_is_that_of_the_bare_model(
    session: Callable[[nn.Module], AbstractContextManager[Any]], make: Callable[[], nn.Module]
) -> None:
    """Row 18: bit for bit, with nothing of ours in it, and what was on the model is on it again in the same order."""
    torch.manual_seed(0)
    model = make()
    bare = torch.jit.script(model)
    with session(model):
        on = tables(model)
        scripted = torch.jit.script(model)
        assert tables(model) == on
        assert bytes_of(scripted) == bytes_of(bare)
        assert scripted._c._type() == bare._c._type()
        assert is_bare(scripted)
    for one, other in zip(torch.jit._flatten(scripted(X))[0], torch.jit._flatten(bare(X))[0], strict=True):  # type: ignore[attr-defined]
        assert torch.equal(one, other)
    assert bytes_of(torch.jit.script(model)) == bytes_of(bare)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "freeze": lambda model: torch.jit.freeze(torch.jit.script(model.eval())),
    "for inference": lambda model: torch.jit.optimize_for_inference(torch.jit.script(model.eval())),
    "loaded": lambda model: torch.jit.load(io.BytesIO(bytes_of(torch.jit.script(model)))),
    "trace with an exported method": lambda model: torch.jit.trace(model, X),
    "wrapper": lambda model: torch.jit.script(nn.Sequential(model, nn.Identity())),
    "child": lambda model: torch.jit.script(model[0]),  # type: ignore[index]
    "trace of scripted children": lambda model: torch.jit.trace(
        nn.Sequential(*(torch.jit.script(child) for child in model.children())), X
    ),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("session", [th.record, all_hooks, edits], ids=["recording", "hooks", "edits"])
def test_every_way_to_a_script_gives_the_bare_one(
    session: Callable[[nn.Module], AbstractContextManager[Any]], name: str
) -> None:
    """Row 18, same kind: with other functions, of a part, of a whole that contains the model."""
    way = WAYS[name]
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Identity())
    bare = way(model)
    with session(model):
        made = way(model)
    assert torch.equal(made(X), bare(X))
    assert is_bare(made)
    if (
        session is th.record or "trace" not in name
    ):  # what hooks and edits do while a trace is made is part of it, as in torch
        assert made.code == bare.code


def test_a_script_class_that_takes_a_hooked_module_in() -> None:
    """Row 18, same kind: a class derived from ScriptModule is made into a script by its own constructor."""

    class Old(torch.jit.ScriptModule):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @torch.jit.script_method  # pyright: ignore[reportPrivateImportUsage]
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with th.record(inner) as rec:
        scripted = Old(inner)
        assert torch.equal(scripted(X), inner(X) + 1)
    assert is_bare(scripted)
    assert forward_paths(rec) == ["", "0", "1"]


def test_the_session_goes_on() -> None:
    """Row 18: calls before and after are recorded, with their gradients; what the script runs is not, and no call is doubled."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with th.record(model, tensors=True) as rec, th.hooks(model) as hooks:
        handle = hooks.backward("0", ignore)
        for _ in range(2):
            model(X).sum().backward()
            scripted = torch.jit.script(model)
            scripted(X).sum().backward()
    assert forward_paths(rec) == ["", "0", "1"] * 2
    assert handle.fired == 2
    assert missing(rec) == {}
    assert rec["0"].calls[1].grad_output is not None


def scriptable(self: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """A hook that TorchScript takes over."""
    return output * 2


def test_hooks_of_others_are_made_part_of_the_script_as_ever() -> None:
    """Row 18, same kind: a hook that TorchScript can read belongs to the script; ours stands before and after it, and again does."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with th.hooks(model) as hooks, contextlib.ExitStack() as stack:
        first = hooks.forward("0", ignore)
        stack.enter_context(model[0].register_forward_hook(scriptable))
        last = hooks.forward("0", ignore)
        on = tables(model)
        scripted = torch.jit.script(model)
        assert tables(model) == on
        assert torch.equal(scripted(X), model(X))
        assert (first.fired, last.fired) == (1, 1)


def test_a_hook_that_cannot_be_scripted_fails_as_ever_and_ours_are_back() -> None:
    """Row 18, same kind: the error is torch's own, of somebody else's hook."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: print(output, file=io.StringIO()))
    with pytest.raises(Exception) as bare:
        torch.jit.script(model)
    with th.record(model) as rec:
        on = tables(model)
        with pytest.raises(type(bare.value)) as inside:
            torch.jit.script(model)
        assert tables(model) == on
        model(X)
    assert str(inside.value).splitlines()[0] == str(bare.value).splitlines()[0]
    assert forward_paths(rec) == ["", "0", "1"]


class Unscriptable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + sum(map(len, zip()))  # type: ignore[arg-type]


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_where_a_model_cannot_be_made_into_a_script_the_hooks_are_back(
    session: Callable[[nn.Module], AbstractContextManager[Any]],
) -> None:
    """Row 18, same kind: an error of the compiler's ends no session."""
    model = nn.Sequential(nn.Linear(2, 2), Unscriptable())
    with session(model):
        on = tables(model)
        with pytest.raises(RuntimeError):
            torch.jit.script(model)
        assert tables(model) == on
        model(X)


class Meddling(nn.Module):
    """Runs something while it is made into a script."""

    __jit_unused_properties__ = ("__constants__",)

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        vars(self)["__meddle"] = meddle  # such names are left out of scripts

    @property
    def __constants__(self) -> list[str]:  # type: ignore[override]
        vars(self)["__meddle"]()
        return []

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_is_taken_off_while_a_script_is_made_stays_off() -> None:
    """Row 18, same kind: by whatever runs in that time, another thread or the model's own code."""
    ends: list[Callable[[], None]] = []

    def meddle() -> None:
        while ends:
            ends.pop()()

    model = nn.Sequential(nn.Linear(2, 2), Meddling(meddle))
    bare = tables(model)
    recorder = th.record(model).start()
    hooks = th.hooks(model)
    handle = hooks.forward("0", ignore)
    editor = th.edit(model)
    editor.skip("0")
    editor.start()
    ends += [recorder.close, handle.remove, editor.close]
    torch.jit.script(model)
    assert tables(model) == bare
    hooks.close()


@pytest.mark.usefixtures("loaded_compiler")
def test_a_module_that_was_compiled_in_place_and_is_skipped() -> None:
    """Row 18, same kind: what the user put in that place is on the model for the script, as it is without us."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].compile(backend="eager")
    compiled = vars(model[0])["_compiled_call_impl"]
    with th.edit(model) as edit:
        edit.skip("0")
        torch.jit.script(model)
        assert torch.equal(model(X), torch.tanh(X))
    assert vars(model[0])["_compiled_call_impl"] is compiled


def test_outside_of_sessions_nothing_is_patched() -> None:
    """Row 18: the one function that is replaced for a session is torch's own again after it, also with sessions that overlap."""
    recursive: Any = torch.jit._recursive  # type: ignore[attr-defined]
    create = recursive.create_script_module
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    first, second = th.record(model).start(), th.record(model).start()
    assert recursive.create_script_module is not create
    first.close()
    assert is_bare(torch.jit.script(model))
    second.close()
    assert recursive.create_script_module is create
