"""A recording of tensors on a device: nothing waits for it within a step, and the rows are those of the host.

Where there is no accelerator, tensors of the host take its path; what only an accelerator can show is in ``test_gpu.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.backends import _torch_device as devices
from tenterhook.backends.torch import TorchBackend
from tenterhook.stats import STATISTICS

COLUMNS = ("seq", "step", "path", "kind", "slot", "call", "phase", "shape", "dtype", "note")
WAITS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::masked_select",
)


class Net(nn.Module):
    """Small tensors and ones of more than one part, views, a module that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 600)
        self.act = nn.ReLU(inplace=True)
        self.turn = nn.Identity()
        self.out = nn.Linear(600, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.wide(x))
        return self.out(self.turn(h.transpose(0, 1)).transpose(0, 1))


class Ordered:
    """How many measurements have been ordered, and within which events parcels were waited for."""

    def __init__(self) -> None:
        self.count = 0
        self.waits = 0


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ordered]:
    """Tensors of the host take the path of a device's; what takes it is counted."""
    seen = Ordered()
    add, bring = devices.DeviceRows.add, devices.DeviceRows._bring

    def counted(*args: Any) -> None:
        seen.count += 1
        add(*args)

    def awaited(*args: Any) -> None:
        seen.waits += 1
        bring(*args)

    monkeypatch.setattr(devices.DeviceRows, "add", counted)
    monkeypatch.setattr(devices.DeviceRows, "_bring", awaited)
    monkeypatch.setattr(
        "tenterhook.capture.new_engine", lambda parts: None
    )  # of the native path, which is for the host's
    monkeypatch.setattr(TorchBackend, "measure", TorchBackend._measure_unusual)
    monkeypatch.setattr(TorchBackend, "defers", lambda self, tensor: True)
    yield seen
    assert seen.count, "no tensor took the path of a device"


def train(steps: int, during: Callable[[int], None] = lambda step: None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.record(model, **options) as rec:
        for step in range(steps):
            model(torch.randn(2000, 16)).square().mean().backward()
            during(step)
            optimizer.step()
            optimizer.zero_grad()
    return rec


def assert_same_values(ours: Any, theirs: Any) -> None:
    ours, theirs = (rec.table("values").sort_by("seq") for rec in (ours, theirs))
    assert ours.num_rows == theirs.num_rows
    for name in (*COLUMNS, "numel", "nan_count", "posinf_count", "neginf_count", "zero_count", "min", "max", "digest"):
        assert ours.column(name).to_pylist() == theirs.column(name).to_pylist(), name
    for name in STATISTICS:
        found, expected = (table.column(name).to_numpy().astype(float) for table in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9, err_msg=name)
    found, expected = (np.array(table.column("sketch").to_pylist()) for table in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "update")


def test_the_rows_are_those_of_the_host(request: pytest.FixtureRequest) -> None:
    on_host = train(3, kinds=KINDS)
    ordered = request.getfixturevalue("ordered")
    on_device = train(3, kinds=KINDS)
    assert ordered.count == on_host.table("values").num_rows
    assert_same_values(on_device, on_host)


def test_nothing_waits_within_a_step(ordered: Ordered) -> None:
    """Torch's own profiler sees every operation, ours included: none of them hands a value to the host."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2000, 16)
    with th.record(model, kinds=("input", "output", "grad_input", "grad_output")) as rec:
        model(x).square().mean().backward()
        rec.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x).square().mean().backward()
        names = {event.name for event in profile.events() or ()}
        assert "aten::gather" in names, "our operations are among those seen"
        assert not names.intersection(WAITS)
        assert ordered.waits == 0
        rec.step()
    assert ordered.waits > 0
    table = rec.table("values")
    assert table.num_rows == ordered.count
    assert table.column("mean").null_count == table.column("sketch").null_count == 0


def test_reading_within_a_step_gives_complete_rows(ordered: Ordered) -> None:
    torch.manual_seed(0)
    model = Net()
    with th.record(model) as rec:
        model(torch.randn(2000, 16))
        table = rec.table("values")
        assert table.num_rows == 5
        assert table.column("digest").null_count == 0
        model(torch.randn(2000, 16))
        assert rec.table("values").num_rows == 10


def test_an_error_in_the_model_leaves_complete_rows(ordered: Ordered) -> None:
    model = Net()
    model.out.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError), th.record(model) as rec:
        model(torch.randn(2000, 16))
    table = rec.table("values")
    assert table.column("path").to_pylist() == ["wide", "act", "turn"]
    assert table.column("std").null_count == 0


def test_rows_on_disk(ordered: Ordered, tmp_path: Path) -> None:
    rec = train(3, to=tmp_path / "device.thk")
    table = th.open(tmp_path / "device.thk").table("values")
    assert table.num_rows == ordered.count == rec.table("values").num_rows
    assert table.column("rms").null_count == 0


def test_more_rows_than_a_block_holds(ordered: Ordered) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(100)))
    with th.record(model, kinds=("output",)) as rec:
        for step in range(50):
            model(torch.full((3,), float(step)))
    table = rec.table("values")
    assert table.num_rows == ordered.count == 5050
    assert table.column("mean").to_pylist() == [float(step) for step in table.column("step").to_pylist()]


def test_a_device_that_fails_loses_its_rows_with_a_reason(ordered: Ordered, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with th.record(model, kinds=("output",)) as rec:
        model(torch.randn(8, 16))

        def fail(self: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", fail)
            rec.step()
            table = rec.table("values")
        model(torch.randn(8, 16))
    assert table.column("note").to_pylist() == ["lost with its device: CUDA error: out of luck"] * 5
    assert table.column("mean").null_count == 5
    later = rec.table("values").slice(5)
    assert (later.num_rows, later.column("mean").null_count, later.column("note").null_count) == (5, 0, 5)


def test_our_operations_are_seen_by_no_mode_of_the_users(ordered: Ordered) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def operations(record: bool) -> list[str]:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(2000, 16)
        seen.clear()
        if record:
            with th.record(model, kinds=("output",)), Functions(), Operations():
                model(x)
        else:
            with Functions(), Operations():
                model(x)
        looks = ("__get__", "data_ptr", "untyped_storage", "_is_zerotensor")  # what computes nothing
        return [name for name in seen if not any(look in name for look in looks)]

    assert operations(record=True) == operations(record=False)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes(ordered: Ordered, mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2000, 16)
    with th.record(model, kinds=("output",)) as rec:
        with mode():
            model(x)
        model(x)
        rec.step()
        with mode():
            model(x)
    table = rec.table("values")
    assert (table.num_rows, table.column("mean").null_count) == (15, 0)


def test_a_recorded_run_stays_the_same_to_the_bit(ordered: Ordered) -> None:
    def run(record: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        session = th.record(model) if record else None
        if session is not None:
            session.__enter__()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2000, 16)).square().mean().backward()
            optimizer.step()
        if session is not None:
            session.__exit__(None, None, None)
        return [*model.parameters(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(record=True), run(record=False), strict=True))
