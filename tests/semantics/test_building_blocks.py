"""What tenterhook builds on and torch does not promise: a release that changes one of these fails here first, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


def _graph_task() -> int:
    return torch._C._current_graph_task_id()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_backward_pass_has_a_number_and_a_forward_has_none(reentrant: bool) -> None:
    """By that a recomputation is told from a forward, in both modes of checkpointing."""
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(_graph_task() != -1)
        return x.exp()

    checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    assert seen == [False, True]
    assert _graph_task() == -1


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason=f"torch {torch.__version__} does not tell its hooks on saved values: regions are found by their frames there",
)
def test_a_region_that_is_not_reentrant_is_known_by_its_hook_on_saved_values() -> None:
    names: list[str] = []

    def run(x: Tensor) -> Tensor:
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)
        names.append(pack.__qualname__)
        return x.exp()

    checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert names == ["_checkpoint_hook.__init__.<locals>.pack_hook"]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_reentrant_region_runs_first_without_gradients() -> None:
    modes: list[bool] = []

    def run(x: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return x.exp()

    checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=True).sum().backward()  # type: ignore[union-attr]
    assert modes == [False, True]


def test_changes_in_place_are_counted_but_for_inference_tensors() -> None:
    x = torch.ones(2)
    before = x._version
    x.add_(1)
    assert x._version == before + 1
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version"):
        torch.ones(1)._version  # noqa: B018 - what is read is what is tested


def test_whether_a_handle_is_live_can_be_read() -> None:
    module = nn.Linear(1, 1)
    handle = module.register_forward_hook(lambda *_: None)
    assert handle.hooks_dict_ref() is module._forward_hooks and handle.id in module._forward_hooks
    module._forward_hooks.clear()
    assert handle.id not in module._forward_hooks


@pytest.mark.usefixtures("loaded_compiler")
def test_compiled_modules_are_known_by_two_attributes() -> None:
    module = nn.Linear(1, 1)
    assert torch.compile(module, backend="eager")._orig_mod is module
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert callable(module._compiled_call_impl)
    assert vars(module)["_compiled_call_impl"] is module._compiled_call_impl


@pytest.mark.usefixtures("loaded_compiler")
def test_a_hook_on_compiled_code_is_ignored_unless_it_is_forced_to_run_eager() -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(1, 1))
    compiled: Any = torch.compile(module, backend="eager")
    compiled(torch.ones(1))
    fired: list[int] = []
    module[0].register_forward_hook(lambda *_: fired.append(1))
    compiled(torch.ones(1))
    assert fired == []
    with torch.compiler.set_stance("force_eager"):
        compiled(torch.ones(1))
    assert fired == [1]
    torch._dynamo.reset()


def test_hooks_on_one_tensor_run_in_the_order_in_which_they_were_put_on() -> None:
    """So that those of a container, put on after its last child's, have to be brought before them."""
    order: list[str] = []
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda gradient: order.append("child"))
    y.register_hook(lambda gradient: order.append("container"))
    y.sum().backward()
    assert order == ["child", "container"]


def test_a_hook_on_an_alias_that_is_changed_in_place_never_runs() -> None:
    """So that it has to be on the input itself, before the module runs."""
    fired: list[str] = []
    x = torch.ones(2, requires_grad=True) * 1
    x.register_hook(lambda gradient: fired.append("input"))
    alias = x.view_as(x)
    alias.register_hook(lambda gradient: fired.append("alias"))
    torch.relu_(alias).sum().backward()
    assert fired == ["input"]


@dataclasses.dataclass
class Box:
    value: Tensor


@pytest.mark.parametrize(
    ("make", "found"),
    [(lambda t: {"a": [(t,)]}, True), (Box, False)],
    ids=["containers", "dataclass"],
)
def test_a_dataclass_is_one_leaf_to_torch(make: Callable[[Tensor], Any], found: bool) -> None:
    assert isinstance(tree_leaves(make(torch.ones(1)))[0], Tensor) is found


def test_hook_tables_and_their_flags_have_the_names_that_are_listed_and_restored() -> None:
    names = {name for name in vars(nn.Module()) if "hook" in name}
    assert names >= {
        "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
        "_load_state_dict_post_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    }  # fmt: skip
