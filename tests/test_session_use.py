"""Sessions that have not begun, cannot begin or are over; what may be asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tenterhook as th


def _net() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_recorder_that_was_never_started_says_how(tmp_path: Path) -> None:
    net, _ = _net()
    rec = th.record(net, to=tmp_path / "a.thk")
    net(torch.ones(1, 2))
    assert not (tmp_path / "a.thk").exists()
    asked: list[Callable[[], object]] = [
        lambda: rec["0"], rec.order, lambda: rec.table("calls"), lambda: rec.query("select 1"), lambda: rec.coverage,
        lambda: rec.recording, lambda: rec.save(tmp_path / "b.thk"), lambda: rec.told, lambda: rec.ended_by,
        lambda: rec.resumed_from, rec.step, rec.pause, rec.resume, lambda: list(rec),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(th.TenterhookError, match=r"has not begun(.|\n)*with th.record"):
            ask()
    rec.close()
    assert repr(rec) == "<Recorder of Sequential, new: nothing yet>"
    with rec:
        net(torch.ones(1, 2))
    assert len(rec["0"].calls) == 1


def test_a_recorder_after_its_end_answers_and_does_no_more() -> None:
    net, _ = _net()
    with th.record(net) as rec:
        net(torch.ones(1, 2))
    assert len(rec.order()) == 3
    for act in (rec.step, rec.pause, rec.resume):
        with pytest.raises(th.TenterhookError, match="of a recording that has ended"):
            act()
    with pytest.raises(th.TenterhookError, match="closed already"):
        rec.start()
    rec.close()
    assert len(rec.order()) == 3


def test_steps_go_on_after_a_fault_of_ours() -> None:
    net, optimizer = _net()
    with th.record(net) as rec:
        rec._capture.stop("a fault")
        rec.step()
        rec.pause()
        rec.resume()
        net(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert rec.recording.manifest.partial == "a fault"


@pytest.mark.parametrize("place", ["seeing_everything", "on_optimizer_step", "attach"])
@pytest.mark.parametrize("to_disk", [True, False])
def test_a_start_that_fails_leaves_nothing(
    place: str, to_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenterhook.backends.torch import TorchBackend
    from tenterhook.capture import Capture

    def fails(*arguments: object, **options: object) -> None:
        raise MemoryError("ours")

    net, _ = _net()
    rec = th.record(net, to=tmp_path / "a.thk" if to_disk else None)
    with monkeypatch.context() as patch:
        patch.setattr(Capture if place == "attach" else TorchBackend, place, fails)
        with pytest.raises(MemoryError, match="ours"):
            rec.start()
    assert not (tmp_path / "a.thk").exists()
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("tenterhook")}
    assert not [hook for module in net.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    with pytest.raises(th.TenterhookError, match="could not begin"):
        rec.order()
    with pytest.raises(th.TenterhookError, match="closed already"):
        rec.start()


def test_tensors_of_modules_that_are_not_recorded_are_refused() -> None:
    net, _ = _net()
    with pytest.raises(th.TenterhookError, match="of modules that are not recorded"):
        th.record(net, "0", tensors="1")


def test_selections_may_be_iterators() -> None:
    net, _ = _net()
    with th.record(net, iter(["0", "1"]), tensors=(path for path in ("1",))) as rec:
        net(torch.ones(1, 2))
    assert [call.path for call in rec.order()] == ["0", "1"]
    assert rec["1"].output.shape == (1, 1)
    assert (rec.recording.manifest.select, rec.recording.manifest.tensors) == ("0, 1", "1")


@pytest.mark.parametrize("every", [1, 2])
def test_what_an_edit_stops_is_recorded_on_sampled_steps_too(every: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, every=every) as rec:
        edit = th.edit(net)
        edit.stop("1")
        with edit:
            for _ in range(3):
                edit.run(net, torch.ones(1, 2)).sum().backward()
                optimizer.step()
    seen = [(row["path"], row["kind"]) for row in rec.table("values").to_pylist() if row["step"] == 2]
    assert seen == [("0", "output"), ("1", "output"), ("1", "grad_output"), ("0", "grad_output")]
