"""A recording of a MindSpore model on an accelerator: nothing waits within a step, and the rows are those of the host.

There is no accelerator here: tensors of the host take the path of a device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

import tenterhook as th
from tenterhook.backends import _mindspore_device as devices
from tenterhook.backends.mindspore import MindSporeBackend
from tenterhook.stats import STATISTICS
from tenterhook.stats.layout import DTYPES

COLUMNS = ("seq", "step", "path", "kind", "slot", "call", "phase", "shape", "dtype", "note")
KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "update")
ROWS = 2000


class Turn(nn.Cell):
    """Gives a view."""

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return ops.transpose(x, (1, 0))


class Net(nn.Cell):
    """Small tensors and ones of more than one part, views, functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Dense(16, 600)
        self.act = nn.ReLU()
        self.turn = Turn()
        self.out = nn.Dense(600, 3)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        h = self.act(self.wide(x))
        return self.out(ops.transpose(self.turn(h * 2.0), (1, 0)))


def new_net() -> Net:
    ms.set_seed(0)
    net = Net()
    rng = np.random.default_rng(0)
    for parameter in net.trainable_params():
        parameter.set_data(ms.Tensor(rng.standard_normal(parameter.shape).astype(np.float32) / 10))
    return net


def batch(step: int, rows: int = ROWS) -> ms.Tensor:
    return ms.Tensor(np.random.default_rng(step).standard_normal((rows, 16)).astype(np.float32))


def train(net: Net, steps: int, *, rows: int = ROWS, during: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Train, and return what a change of the model's numbers would show in."""
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    step_of = ms.value_and_grad(lambda x: ops.square(net(x)).mean(), None, optimizer.parameters)
    seen: list[Any] = []
    for step in range(steps):
        loss, gradients = step_of(batch(step, rows))
        seen += [loss, *gradients]
        during(step)
        optimizer(gradients)
    return [one.asnumpy() for one in (*seen, *net.trainable_params())]


class Device:
    """What has been ordered of it, and what has been brought over."""

    def __init__(self) -> None:
        self.ordered = 0
        self.brought = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Tensors of the host take the path of a device's; what takes it is counted."""
    seen = Device()
    add, bring = devices.DeviceRows.add, devices.DeviceRows._arrived

    def counted(*args: Any, **kwargs: Any) -> None:
        seen.ordered += 1
        add(*args, **kwargs)

    def brought(*args: Any) -> np.ndarray:
        seen.brought += 1
        return bring(*args)

    for dtype in DTYPES:  # what is tried once in a process is tried before we count
        devices.way_of(dtype.name, "cpu")
    monkeypatch.setattr(devices.DeviceRows, "add", counted)
    monkeypatch.setattr(devices.DeviceRows, "_arrived", brought)
    monkeypatch.setattr(MindSporeBackend, "defers", lambda self, device: True)
    yield seen
    assert seen.ordered, "no tensor took the path of a device"


@pytest.fixture
def transfers(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every way in which MindSpore gives a value to the host, as it is used."""
    seen: list[str] = []
    for name in ("asnumpy", "numpy", "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__array__"):
        genuine = getattr(ms.Tensor, name, None)
        if genuine is None:
            continue

        def noted(self: ms.Tensor, *args: Any, _name: str = name, _genuine: Any = genuine, **kwargs: Any) -> Any:
            seen.append(_name)
            return _genuine(self, *args, **kwargs)

        monkeypatch.setattr(ms.Tensor, name, noted)
    return seen


def test_one_transfer_a_step_however_many_cells(device: Device, transfers: list[str]) -> None:
    net = nn.SequentialCell(*[nn.Dense(4, 4) for _ in range(60)])
    x = ms.Tensor(np.ones((2, 4), np.float32))
    step_of = ms.value_and_grad(lambda x: ops.square(net(x)).mean(), None, net.trainable_params())
    kinds = ("input", "output", "grad_output", "param_grad", "update")  # values of parameters are the next step's
    with th.record(net, kinds=kinds) as rec:
        for _ in range(3):
            transfers.clear()
            before = device.ordered
            step_of(x)
            rec.step()
            ordered = device.ordered - before
            assert transfers == [], "nothing waits within a step"
            table = rec.table("values")
            assert transfers == ["asnumpy"], "and one transfer brings it all over"
        assert ordered > 300
    assert (table.num_rows, table.column("mean").null_count) == (device.ordered, 0)
    assert table.column("sketch").null_count == table.column("digest").null_count == 0


def test_the_rows_are_those_of_the_host(request: pytest.FixtureRequest) -> None:
    def recorded() -> Any:
        net = new_net()
        with th.record(net, kinds=KINDS) as rec:
            train(net, 3)
        return rec

    on_host = recorded()
    device = request.getfixturevalue("device")
    on_device = recorded()
    ours, theirs = (rec.table("values").sort_by("seq") for rec in (on_device, on_host))
    assert device.ordered == ours.num_rows - ours.column("numel").null_count
    assert ours.num_rows == theirs.num_rows
    exact = ("numel", "nan_count", "posinf_count", "neginf_count", "zero_count", "min", "max", "digest")
    for name in (*COLUMNS, *exact):
        assert ours.column(name).to_pylist() == theirs.column(name).to_pylist(), name
    for name in STATISTICS:
        found, expected = (table.column(name).to_numpy().astype(float) for table in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9, err_msg=name)
    found, expected = (np.array(table.column("sketch").drop_null().to_pylist()) for table in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    calls = [rec.table("calls").sort_by("seq").column("path").to_pylist() for rec in (on_device, on_host)]
    assert calls[0] == calls[1], "operations of ours are no calls of the model"


def test_a_recorded_run_stays_the_same_to_the_bit(device: Device) -> None:
    bare = train(new_net(), 3)
    net = new_net()
    ms.set_seed(7)
    with th.record(net, kinds=("output", "grad_output", "param", "param_grad", "update")):
        watched = train(net, 3)
    drawn = ops.standard_normal((4,)).asnumpy()
    ms.set_seed(7)
    assert np.array_equal(drawn, ops.standard_normal((4,)).asnumpy()), "no random number was drawn"
    assert all(np.array_equal(one, other) for one, other in zip(bare, watched, strict=True))


def test_a_cell_that_writes_into_what_was_measured(device: Device) -> None:
    class Writes(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            h = self.inner(x)
            h[0] = 5.0
            return h * 3

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ReLU()

    def run(net: nn.Cell) -> list[np.ndarray]:
        x = ms.Tensor(np.random.default_rng(0).standard_normal((700, 200)).astype(np.float32))
        return [one.asnumpy() for one in ms.value_and_grad(lambda x: ops.square(net(x)).sum())(x)]

    bare = run(Writes())
    net = Writes()
    with th.record(net) as rec:
        watched = run(net)
    assert all(np.array_equal(one, other) for one, other in zip(bare, watched, strict=True))
    inner, outer = (rec.table("values").to_pylist()[at] for at in (0, 1))
    assert (inner["path"], outer["path"]) == ("inner", "")
    assert inner["max"] < 5 < outer["max"] == 15


def test_under_a_mode_of_the_users_nothing_is_computed(device: Device) -> None:
    """MindSpore cannot keep all of our operations from it; so there are none, and the host copies."""
    seen: list[str] = []

    class Operations(ms.MsDispatchMode):
        def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
            seen.append(func.name)
            return func(*args)

    def operations(record: bool) -> list[str]:
        net = new_net()
        seen.clear()
        if record:
            with th.record(net, kinds=("output",)) as rec:
                with Operations():
                    net(batch(0))
                before = device.ordered
                net(batch(1))
            assert (before, device.ordered) == (0, 5)
            assert rec.table("values").column("mean").null_count == 0
        else:
            with Operations():
                net(batch(0))
                ended = len(seen)
            net(batch(1))
            assert len(seen) == ended
        return list(seen)

    assert operations(record=True) == operations(record=False) != []


def test_where_functional_calls_are_watched_nothing_is_computed(device: Device) -> None:
    """They are watched by a mode of MindSpore's, in which operations of ours could end the process."""

    def recorded(net: nn.Cell) -> tuple[list[tuple[Any, ...]], th.Recorder]:
        step_of = ms.value_and_grad(lambda x: ops.square(net(x)).mean(), None, net.trainable_params())
        with th.record(net, ops=True, kinds=("output", "grad_output", "param", "update")) as rec:
            for at in range(2):
                step_of(batch(at))
                rec.step()
                rec.table("values")
        rows = rec.table("values").to_pylist()
        return [(row["path"], row["kind"], row["digest"], row["max"]) for row in rows], rec

    by_force, rec = recorded(new_net())
    table = rec.table("values")
    assert table.column("mean").null_count == 0
    assert 0 < device.ordered < table.num_rows, "what is seen outside of the mode takes the path of a device"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MindSporeBackend, "defers", lambda self, device: False)
        assert recorded(new_net())[0] == by_force


def test_rows_that_are_brought_over_within_the_mode_are_whole(device: Device) -> None:
    """Their pieces, ordered before it was on, come over one by one."""
    first, second = new_net(), new_net()
    with th.record(first, kinds=("output",)) as rec:
        first(batch(0))

        class Reads(ms.MsDispatchMode):
            def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
                return func(*args)

        with Reads():
            second(batch(0))
            table = rec.table("values")
    assert (device.ordered, table.num_rows, table.column("mean").null_count) == (5, 5, 0)


def test_reading_within_a_step_gives_complete_rows(device: Device) -> None:
    net = new_net()
    with th.record(net) as rec:
        net(batch(0))
        table = rec.table("values")
        assert table.num_rows == 5
        assert table.column("digest").null_count == 0
        net(batch(1))
        assert rec.table("values").num_rows == 10


def test_an_error_in_the_model_leaves_complete_rows(device: Device) -> None:
    class Fails(Net):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            self.act(self.wide(x))
            raise ZeroDivisionError

    net = Fails()
    with pytest.raises(ZeroDivisionError), th.record(net) as rec:
        net(batch(0))
    table = rec.table("values")
    assert table.column("path").to_pylist() == ["wide", "act"]
    assert table.column("std").null_count == 0


def test_rows_on_disk(device: Device, tmp_path: Path) -> None:
    net = new_net()
    with th.record(net, to=tmp_path / "device.thk") as rec:
        train(net, 3)
    table = th.open(tmp_path / "device.thk").table("values")
    assert table.num_rows == device.ordered == rec.table("values").num_rows
    assert table.column("rms").null_count == 0


def test_a_device_that_fails_loses_its_rows_with_a_reason(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    net = new_net()
    with th.record(net, kinds=("output",)) as rec:
        net(batch(0, 8))

        def fail(self: ms.Tensor) -> np.ndarray:
            raise RuntimeError("Sync stream failed.\nmore of it")

        with monkeypatch.context() as patch:
            patch.setattr(ms.Tensor, "asnumpy", fail)
            rec.step()
            table = rec.table("values")
        net(batch(0, 8))
    assert table.column("note").to_pylist() == ["lost with its device: Sync stream failed."] * 5
    assert table.column("mean").null_count == 5
    later = rec.table("values").slice(5)
    assert (later.num_rows, later.column("mean").null_count, later.column("note").null_count) == (5, 0, 5)


def test_a_change_of_a_callback_is_told_on_a_device_too(device: Device) -> None:
    """The digest that tells it is asked for at once."""
    net = new_net()
    with th.hooks(net) as hooks:
        hooks.forward("act", lambda cell, args, output: output * 2)
        twice = net(batch(0)).asnumpy()
    assert not np.array_equal(twice, net(batch(0)).asnumpy())
    from tenterhook import changing
    from tenterhook.backends.mindspore import BACKEND

    assert changing._digest(BACKEND, batch(0)) == changing._digest(BACKEND, batch(0)) != None  # noqa: E711
    assert changing._digest(BACKEND, batch(0)) != changing._digest(BACKEND, batch(1))
