"""Section B, row 02 in alias mode: tensors kept without a copy, and marked stale where they were changed later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import NotRecordedError, TenterhookError


def _value(rec: Any, path: str, kind: str = "output", slot: str = "") -> Any:
    (value,) = [one for one in rec[path].calls[0].select(kind) if one.slot == slot]
    return value


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def _x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4)


def test_an_alias_shares_memory_and_has_no_graph() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    seen: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, output: seen.append(output))
    with th.record(net, tensors=True, alias=True) as rec:
        net(_x()).sum().backward()
    kept = rec["0"].output
    assert kept.data_ptr() == seen[0].data_ptr()
    assert torch.equal(kept, seen[0])
    assert not kept.requires_grad
    assert kept.grad_fn is None
    assert not _value(rec, "0").stale


@pytest.mark.parametrize(
    "change",
    [
        lambda output: None,  # the in-place layer of the net alone
        lambda output: output.add_(1),
        lambda output: output[0].zero_(),
        lambda output: torch.add(output, 1, out=output.detach()),
    ],
    ids=["in-place layer", "add_", "a view", "out="],
)
def test_what_is_changed_in_place_later_is_stale(change: Callable[[Tensor], Any]) -> None:
    """The output that an in-place layer or the caller overwrites is not given as what was seen; its statistics are."""
    net = _net()
    truth = net[0](_x())
    with torch.no_grad(), th.record(net, tensors=True, alias=True) as rec:
        change(net(_x()))
    value = _value(rec, "0")
    assert value.stale
    assert "(stale)" in repr(value)
    assert value.min == truth.min().item() < 0
    assert rec["0"].output == value  # a Value stands for it
    with pytest.raises(NotRecordedError, match=r"0:output#0@0 was changed in place after it was seen.*alias=True"):
        _ = value.tensor


def test_what_is_not_changed_is_given_beside_what_is() -> None:
    net = _net()
    with torch.no_grad(), th.record(net, tensors=True, alias=True) as rec:
        out = net(_x())
    assert [_value(rec, path).stale for path in ("0", "1", "2")] == [True, False, False]
    assert rec["2"].output.data_ptr() == out.data_ptr()
    assert torch.equal(rec["1"].output, torch.relu(net[0](_x())))


def test_inputs_buffers_and_parts_of_nested_outputs() -> None:
    """Another container, another call style: a buffer that is used again, a keyword input, one slot of a dict."""

    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.zeros(2))

        def forward(self, *, x: Tensor) -> dict[str, Any]:
            self.buffer.copy_(x)
            return {"buffer": self.buffer, "rest": [x * 2]}

    net = Reused()
    x = torch.ones(2)
    with torch.no_grad(), th.record(net, tensors=True, alias=True) as rec:
        net(x=x)
        assert not _value(rec, "", slot='["buffer"]').stale
        net(x=torch.zeros(2))
        x.fill_(7)
    assert _value(rec, "", slot='["buffer"]').stale
    assert not _value(rec, "", slot='["rest"][0]').stale
    assert _value(rec, "", "input", "x").stale


def test_gradients_and_parameters() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kinds = ["grad_output", "param", "param_grad"]
    with th.record(net, kinds=kinds, tensors=True, alias=True, on_error="raise") as rec:
        net(_x()).sum().backward()
        fresh = {
            row["path"] + row["slot"]: row["tensor"]
            for row in rec.table("values").to_pylist()
            if row["kind"] == "param"
        }
        assert all(rec.recording._source.has_tensor(key, 0) for key in fresh.values())
        optimizer.step()
        rec.step()
        assert not any(rec.recording._source.has_tensor(key, 0) for key in fresh.values())
    assert torch.equal(rec["2"].calls[0].grad_output, torch.ones(3, 2))


def test_inference_tensors_are_copied() -> None:
    """They have no count of changes."""
    net = _net()
    with torch.inference_mode(), th.record(net, tensors=True, alias=True) as rec:
        truth = net[0](_x()).clone()
        out = net(_x())
        out.zero_()
    assert torch.equal(rec["0"].calls[1].output, truth)
    assert not rec["0"].calls[1].select("output")[0].stale
    assert rec["2"].output.abs().sum() > 0


def test_without_alias_nothing_is_stale() -> None:
    net = _net()
    truth = net[0](_x())
    with torch.no_grad(), th.record(net, tensors=True) as rec:
        net(_x())
    assert torch.equal(rec["0"].output, truth)
    assert not _value(rec, "0").stale


def test_what_is_stale_is_not_saved(tmp_path: Path) -> None:
    net = _net()
    with torch.no_grad(), th.record(net, tensors=True, alias=True) as rec:
        out = net(_x())
    rec.save(tmp_path / "a.thk")
    saved = th.open(tmp_path / "a.thk")
    value = _value(saved, "0")
    assert value.key is None
    assert value.note == "changed in place after it was seen, and alias=True made no copy"
    assert value.digest == _value(rec, "0").digest
    np.testing.assert_array_equal(saved["2"].output, out.numpy())


@pytest.mark.parametrize("options", [{"to": "a.thk"}, {"tensors_dtype": "float16"}])
def test_aliases_are_for_memory(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TenterhookError, match="alias=True keeps the program's own tensors"):
        th.record(_net(), tensors=True, alias=True, **options)
    assert list(tmp_path.iterdir()) == []


def test_hooks_hand_out_references() -> None:
    """A callback of th.hooks is given the very tensors; what it keeps of them it copies."""
    net = _net()
    kept: list[Tensor] = []
    with torch.no_grad(), th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: kept.append(output))
        net(_x())
    assert torch.equal(kept[0], torch.relu(net[0](_x())))
    assert kept[0]._version == 1
