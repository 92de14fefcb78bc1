"""Names of shared, deep and many modules: each module once, under its first path, and no work that grows faster than the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.semantics.asking import forward_paths, ignore


class Pair(nn.Module):
    """Calls one module under two names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.left = inner
        self.right = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


def test_a_shared_module_has_one_path_and_aliases() -> None:
    model = Pair(nn.Linear(2, 2))
    with th.record(model, kinds=["output", "param_grad"]) as rec:
        model(torch.ones(1, 2)).sum().backward()
    assert forward_paths(rec) == ["", "left", "left"]
    assert [call.call for call in rec.order() if call.phase == "forward"] == [0, 0, 1]
    rows = {row["path"]: row for row in rec.table("modules").to_pylist()}
    assert rows["left"]["aliases"] == ["right"] and list(rows) == ["", "left"]
    assert rows["left"]["parameters"] == 6
    gradients = [row["slot"] for row in rec.table("values").to_pylist() if row["kind"] == "param_grad"]
    assert sorted(gradients) == ["bias", "weight"]


def test_an_alias_selects_and_is_hooked_once() -> None:
    model = Pair(nn.Sequential(nn.Linear(2, 2)))
    with th.hooks(model) as hooks:
        for selection in ("right.0", "right.*", "left.0, right.0", "*.0", ["right.0", nn.Linear]):
            assert hooks.forward(selection, ignore).paths == ["left.0"]
        handle = hooks.forward("right.0", ignore)
        model(torch.ones(1, 2))
    assert handle.fired == 2


def test_nested_sharing_is_not_unfolded() -> None:
    """Forty levels of pairs have 2**40 paths; the layer is called once for each that ran."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(40):
        model = Pair(model)
    with th.hooks(model) as hooks:
        assert len(hooks.forward("**", ignore).paths) == 41
        path = ".".join(["left"] * 40)
        assert hooks.forward("type:Linear", ignore).paths == [path]
        assert hooks.param_grad("**.weight", ignore).paths == [f"{path}.weight"]
    shallow: Any = Pair(Pair(Pair(nn.Linear(2, 2))))
    with th.record(shallow, "type:Linear") as rec:
        shallow(torch.ones(1, 2))
    assert [call.call for call in rec.order()] == list(range(8))


def test_a_module_that_holds_itself() -> None:
    """A reference to the parent, registered as a child."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model
    with th.record(model) as rec:
        model(torch.ones(1, 2))
    assert forward_paths(rec) == ["", "0"]


def test_work_on_many_modules_grows_with_their_number() -> None:
    """Counted by how often the model's tables are looked at, not by the clock: ten times the modules, ten times the work."""

    class Counted(dict[str, Any]):
        looks = 0

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    def looks(count: int) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(count)))
        for module in model.modules():
            module._modules = Counted(module._modules)
        Counted.looks = 0
        with th.hooks(model) as hooks:
            hooks.forward("**", ignore)
            hooks.backward("*.0", ignore)
            hooks.param_grad("**", ignore) if list(model.parameters()) else None
            str(hooks)
        with th.record(model) as rec:
            pass
        assert len(rec.coverage.missing) == 2 * count + 1
        return Counted.looks

    assert looks(1000) < 11 * looks(100)


@pytest.mark.slow
def test_ten_thousand_modules() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(5_000)))
    with th.record(model, "**", stats=None, kinds="output") as rec:
        model(torch.ones(1))
    assert len(forward_paths(rec)) == 10_001
    with th.hooks(model) as hooks:
        handle = hooks.forward("**", ignore)
        model(torch.ones(1))
        assert sum(" forward " in line for line in str(hooks).splitlines()) == 10_001
    assert handle.fired == 10_001
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
