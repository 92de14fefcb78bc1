"""The user's own global torch hooks, on all modules, behave inside a session as they do outside of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_backward_hook,
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tests.semantics.own_hooks_nets import Failing, Pair, Scaled, _x


@pytest.fixture(autouse=True)
def _which_global_backward_hooks() -> Iterator[None]:
    """Torch remembers for good which kind of global backward hook there was first."""
    before = torch.nn.modules.module._global_is_full_backward_hook
    torch.nn.modules.module._global_is_full_backward_hook = None
    yield
    torch.nn.modules.module._global_is_full_backward_hook = before


def test_global_hooks_come_first_in_all_phases(session: Any):
    model = nn.Sequential(nn.Linear(3, 2))
    fired: list[str] = []

    def named(name: str) -> Any:
        return lambda module, *rest: fired.append(name) if module is model[0] else None

    with session(model):
        model[0].register_forward_pre_hook(named("pre"))
        model[0].register_forward_hook(named("post"))
        model[0].register_full_backward_pre_hook(named("backward pre"))
        model[0].register_full_backward_hook(named("backward"))
        handles = [
            register_module_forward_pre_hook(named("global pre")),
            register_module_forward_hook(named("global post")),
            register_module_full_backward_pre_hook(named("global backward pre")),
            register_module_full_backward_hook(named("global backward")),
        ]
        try:
            model(_x()).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
    assert fired == [
        "global pre", "pre", "global post", "post",
        "global backward pre", "backward pre", "global backward", "backward",
    ]  # fmt: skip


def test_global_forward_hooks_may_replace_values_and_remove_themselves(session: Any):
    model = nn.Sequential(Scaled())
    counts = {"pre": 0, "post": 0}

    def pre(module: nn.Module, args: Any) -> Any:
        if isinstance(module, Scaled):
            counts["pre"] += 1
            before.remove()
            return (args[0] * 2,)
        return None

    def post(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, Scaled):
            counts["post"] += 1
            after.remove()
            return output + 1
        return None

    with session(model):
        before, after = register_module_forward_pre_hook(pre), register_module_forward_hook(post)
        try:
            assert model(torch.ones(1)).item() == 3
            assert model(torch.ones(1)).item() == 1
        finally:
            before.remove()
            after.remove()
    assert counts == {"pre": 1, "post": 1}


def test_global_always_called_hook_sees_the_failure_once(session: Any):
    model = nn.Sequential(Failing())
    seen: list[Any] = []
    with session(model):
        handle = register_module_forward_hook(lambda m, args, output: seen.append((type(m), output)), always_call=True)
        try:
            with pytest.raises(RuntimeError, match="from forward"):
                model(_x())
        finally:
            handle.remove()
    assert seen == [(Failing, None), (nn.Sequential, None)]


def test_global_backward_hooks_count_calls_over_retained_graphs(session: Any):
    model = Pair()
    counts = {"forward": 0, "backward": 0}

    def count(kind: str) -> Any:
        def hook(module: nn.Module, *rest: Any) -> None:
            counts[kind] += isinstance(module, nn.Linear)

        return hook

    with session(model):
        handles = [
            register_module_forward_hook(count("forward")),
            register_module_full_backward_hook(count("backward")),
        ]
        try:
            out = model(_x())
            assert counts == {"forward": 2, "backward": 0}
            out.sum().backward(retain_graph=True)
            assert counts == {"forward": 2, "backward": 2}
            out.sum().backward()
            assert counts == {"forward": 2, "backward": 4}
        finally:
            for handle in handles:
                handle.remove()


def test_legacy_global_hook_excludes_a_full_one_as_before(session: Any):
    model = Pair()
    with session(model):
        handle = register_module_backward_hook(lambda *_: None)
        try:
            with pytest.raises(RuntimeError, match="both regular backward hooks and full backward hooks"):
                register_module_full_backward_hook(lambda *_: None)
        finally:
            handle.remove()


def test_registration_hooks_see_what_is_registered(session: Any):
    model = nn.Sequential(nn.Linear(1, 1))
    seen: list[tuple[str, str]] = []
    with session(model):
        handles = [
            register_module_parameter_registration_hook(lambda module, name, value: seen.append(("parameter", name))),
            register_module_buffer_registration_hook(lambda module, name, value: seen.append(("buffer", name))),
            register_module_module_registration_hook(lambda module, name, value: seen.append(("module", name))),
        ]
        try:
            norm = nn.BatchNorm1d(2)
            model.append(norm)
        finally:
            for handle in handles:
                handle.remove()
        model.add_module("later", nn.ReLU())
    assert seen == [
        ("parameter", "weight"), ("parameter", "bias"),
        ("buffer", "running_mean"), ("buffer", "running_var"), ("buffer", "num_batches_tracked"),
        ("module", "1"),
    ]  # fmt: skip
