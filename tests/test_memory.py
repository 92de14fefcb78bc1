"""Nothing piles up over steps but the rows: not in the tracker, not in the capture, not on tensors."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.script_recorder import ScriptRecorder
from tests.semantics.nets import mlp

ALL = ["input", "output", "grad_input", "grad_output", "param_grad", "update"]


def _ours() -> Counter[str]:
    """Count the live objects of our own classes; with the collector off nothing hides a cycle."""
    return Counter(
        type(one).__name__ for one in gc.get_objects() if str(type(one).__module__).startswith("tenterhook.")
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _growth(turn: Callable[[], None], times: int = 40) -> dict[str, int]:
    """What more there is of our objects after many turns than after a few."""
    for _ in range(70):
        turn()
    before = _ours()
    for _ in range(times):
        turn()
    return {name: count for name, count in (_ours() - before).items() if count > times // 4}


class ReturnsParameter(nn.Module):
    """An output that is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 4))

    def forward(self) -> Tensor:
        return self.table


class LeafOutput(nn.Module):
    """Gives a leaf as it is, twice over: a parameter, and whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.same, self.body = ReturnsParameter(), nn.Identity(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.same(x) + self.embed())


def _forward(net: nn.Module) -> Tensor:
    return net(torch.ones(2, 4, requires_grad=True)).sum()


def _plain(net: nn.Module) -> None:
    _forward(net).backward()


def _no_backward(net: nn.Module) -> None:
    _forward(net)


def _inference(net: nn.Module) -> None:
    with torch.no_grad():
        _forward(net)


def _retained(net: nn.Module) -> None:
    loss = _forward(net)
    loss.backward(retain_graph=True)
    loss.backward()


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("backward fails")


def _failing_backward(net: nn.Module) -> None:
    x = torch.ones(2, 4, requires_grad=True) * 1
    x.register_hook(_fail)
    with contextlib.suppress(RuntimeError):
        net(x).sum().backward()


def _failing_forward(net: nn.Module) -> None:
    with contextlib.suppress(RuntimeError):
        net(torch.ones(2, 5, requires_grad=True))


TURNS = [_plain, _no_backward, _inference, _retained, _failing_backward, _failing_forward]


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "without"])
@pytest.mark.parametrize("make", [mlp, LeafOutput])
@pytest.mark.parametrize("turn", TURNS)
def test_recorded_steps_leave_no_objects(
    turn: Callable[[nn.Module], None], make: Callable[[], nn.Module], optimizer: bool
) -> None:
    net = make()
    adam = torch.optim.SGD(net.parameters(), lr=1e-3)
    with _no_collection(), th.record(net, kinds=ALL) as rec:

        def step() -> None:
            turn(net)
            if optimizer:
                adam.step()

        assert _growth(step) == {}
        assert rec._capture.failure is None


@pytest.mark.parametrize("make", [mlp, LeafOutput])
@pytest.mark.parametrize("turn", TURNS)
def test_hooked_calls_leave_no_objects(turn: Callable[[nn.Module], None], make: Callable[[], nn.Module]) -> None:
    net = make()
    with _no_collection(), th.hooks(net) as hooks:
        for kind in ("forward_pre", "forward", "backward_pre", "backward", "param_grad"):
            getattr(hooks, kind)("**", lambda *arguments: None)
        assert _growth(lambda: turn(net)) == {}


def test_gradients_are_let_go_while_the_output_is_kept() -> None:
    net = mlp()
    gone: list[weakref.ref[Tensor]] = []
    with _no_collection(), th.hooks(net) as hooks, th.record(net, kinds=ALL):
        hooks.backward("0", lambda module, grad_input, grad_output: gone.append(weakref.ref(grad_output[0])))
        out = net(torch.ones(2, 4, requires_grad=True))
        out.sum().backward()
        assert [one() for one in gone] == [None]
    assert out.shape == (2, 2)


def test_a_thousand_steps_grow_by_their_rows_only() -> None:
    net = mlp()
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    with th.record(net) as rec:
        sizes: list[int] = []

        def train(times: int) -> None:
            for _ in range(times):
                sgd.zero_grad()
                _forward(net).backward()
                sgd.step()
            sizes.append(rec.table("calls").nbytes + rec.table("values").nbytes)

        train(100)
        gc.collect()
        before, ours = len(gc.get_objects()), _ours()
        train(1000)
        gc.collect()
        # rows are held in Arrow's buffers: a batch of 4096 of them is a handful of Python objects, a row is none
        assert len(gc.get_objects()) - before < 2000
        assert all(count <= 20 for count in (_ours() - ours).values())
    assert len(rec.table("calls")) == 1100 * 8
    assert sizes[1] / sizes[0] == pytest.approx(11, rel=0.1)


def test_inline_losses_of_a_script_leave_nothing(tmp_path: Path) -> None:
    recorder: Any = ScriptRecorder(tmp_path / "rec.thk")
    recorder.start()
    try:
        net = mlp()

        def step() -> None:
            out = net(torch.ones(2, 4))
            nn.MSELoss()(out, torch.zeros(2, 2)).backward()
            nn.CrossEntropyLoss()(out.detach(), torch.tensor([0, 1]))

        with _no_collection():
            assert _growth(step) == {}
            assert len(recorder._models._by_module) < 30
    finally:
        recorder.close()


def test_a_reading_leaves_behind_little_more_than_its_rows() -> None:
    layer = nn.Linear(3, 4)
    with th.record(layer) as rec:
        tracemalloc.start()
        try:
            before = rows = 0
            for turn in range(21):
                layer(torch.ones(2, 3))
                rows = len(rec.table("values"))
                if not turn:  # the blocks that are filled next are there
                    before, _ = tracemalloc.get_traced_memory()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert rows == 21
    assert (after - before) / 20 < 64 * 1024
