"""Programs in which models put hooks on and take them off, raise and call themselves, while sessions begin and end amid calls.

Each program runs twice, without sessions and with them, and has to see the same: values, gradients, errors, which hooks ran, and
what is in the tables in the end.
"""

from __future__ import annotations

import os
import random
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
from tests.properties.trees import Boom
from tests.semantics.asking import ignore

SEEDS = int(os.environ.get("TENTERHOOK_SEEDS", "60"))
ACTS = (
    *["nothing"] * 6, *["forward", "remove", "begin", "end"] * 2, "pre", "backward", "raise", "interrupt", "all", "all before", "pause",
)  # fmt: skip
TABLES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class Interrupt(BaseException):
    """As Ctrl-C: goes past all hooks."""


class Program:
    """What happens in one program, drawn at random but for the sessions."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.random = random.Random(seed)
        self.sessions: list[Any] = []
        self.folder = folder  # None: no sessions
        self.log: list[Any] = []
        self.handles: list[Any] = []
        self.left = 60
        self.root = self._node(3)
        self.nodes = [one for one in self.root.modules() if isinstance(one, Node)]

    def _node(self, depth: int) -> Node:
        return Node(self, [self._node(depth - 1) for _ in range(self.random.randrange(3))] if depth else [])

    def act(self, node: Node) -> None:
        """Do something, on this module or on another one."""
        if self.left:
            self.left -= 1
            at = node if self.random.random() < 0.6 else self.random.choice(self.nodes)
            self._do(self.random.choice(ACTS), at)

    def _do(self, what: str, at: Node) -> None:
        options = {name: self.random.random() < 0.3 for name in ("prepend", "always_call", "with_kwargs")}
        if what == "forward":
            self.handles.append(at.register_forward_hook(self._hook(what), **options))
        elif what == "pre":
            self.handles.append(at.register_forward_pre_hook(self._hook(what), prepend=options["prepend"]))
        elif what == "backward":
            self.handles.append(at.register_full_backward_hook(self._hook(what)))
        elif what == "all":
            self.handles.append(register_module_forward_hook(self._hook(what)))
        elif what == "all before":
            self.handles.append(register_module_forward_pre_hook(self._hook(what)))
        elif what == "remove" and self.handles:
            self.handles.pop(self.random.randrange(len(self.handles))).remove()
        elif what == "raise":
            raise Boom
        elif what == "interrupt":
            raise Interrupt
        elif what in ("begin", "end", "pause"):
            self._session(what, self.random.choice(self.nodes), self.random.randrange(7), self.random.random())

    def _hook(self, what: str) -> Callable[..., Any]:
        label, does = f"{what} {self.left}", self.random.choice(["change", "remove", "nothing"])

        def hook(module: nn.Module, *given: Any) -> Any:
            self.log.append((label, type(module).__name__, len(given)))
            if self.random.random() < 0.05:
                raise Boom
            if does == "remove" and self.handles:
                self.handles[-1].remove()
            return given[-1] * 1.5 if does == "change" and isinstance(given[-1], Tensor) else None

        return hook

    def _session(self, what: str, root: nn.Module, which: int, share: float) -> None:
        if self.folder is None:
            return
        if what == "begin" and len(self.sessions) < 4:
            begun = begin(
                which, self.root if share < 0.7 else root, self.folder / f"{len(list(self.folder.iterdir()))}.thk"
            )
            self.sessions.append(begun)
        elif what == "end" and self.sessions:
            self.sessions.pop(int(share * len(self.sessions))).close()
        elif what == "pause":
            for one in self.sessions:
                if isinstance(one, th.Recorder):
                    one.pause()
                    one.resume()

    def run(self) -> list[Any]:
        """Run it, and return all that was seen."""
        self._session("begin", self.root, self.left % 7, 0.0)
        for _ in range(5):
            x = torch.ones(2, requires_grad=True)
            try:
                output = self.root(x)
                output.sum().backward()
                self.log += [output.tolist(), x.grad]
            except (Boom, Interrupt, RuntimeError) as error:
                self.log.append(repr(error))
            self.log.append([None if one.grad is None else one.grad.item() for one in self.root.parameters()])
        for one in self.sessions:
            one.close()
        self.log.append([[len(getattr(node, table)) for table in TABLES] for node in self.nodes])
        self.log.append([[type(hook).__name__ for hook in node._forward_hooks.values()] for node in self.nodes])
        return [one.tolist() if isinstance(one, Tensor) else one for one in self.log]


def begin(which: int, root: nn.Module, path: Path) -> Any:
    if which == 0:
        hooks = th.hooks(root)
        for kind in ("forward_pre", "forward", "backward_pre"):
            getattr(hooks, kind)("**", ignore)
        return hooks
    if which == 1:
        edit = th.edit(root).start()
        edit.output("**", lambda value: None)
        return edit
    if which == 2:
        recorder = ScriptRecorder(path, ScriptRequest(on_error="raise"))
        recorder.start()
        return recorder
    options: dict[str, Any] = [{}, {"every": 2}, {"kinds": ["input", "output", "grad_output"]}, {"ops": True}][
        which - 3
    ]
    return th.record(root, on_error="raise", **options).start()


class Node(nn.Module):
    def __init__(self, program: Program, parts: list[Node]) -> None:
        super().__init__()
        self.__dict__["program"] = program
        self.parts = nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.tensor(1.0 + program.random.random()))
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        program = self.program
        program.act(self)
        for part in self.parts:
            try:
                x = part(x)
            except (Boom, Interrupt) as error:
                program.log.append(repr(error))
                if program.random.random() < 0.3:
                    raise
        if self.depth < 2 and program.random.random() < 0.1:
            self.depth += 1
            try:
                x = self(x)
            finally:
                self.depth -= 1
        program.act(self)
        return torch.tanh(x) * self.scale


@pytest.fixture(autouse=True)
def _no_hooks_on_all_modules() -> Iterator[None]:
    yield
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called"):
        getattr(registries, name).clear()


def seen(seed: int, folder: Path | None) -> list[Any]:
    try:
        return Program(seed, folder).run()
    finally:
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            getattr(registries, name).clear()


@pytest.mark.filterwarnings("ignore::tenterhook.errors.TenterhookWarning", "ignore:.*hook:UserWarning")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_program_sees_what_it_sees_without_sessions(seed: int, tmp_path: Path) -> None:
    assert seen(seed, tmp_path) == seen(seed, None)
