"""Where MindSpore's own hooks are mute, wrong or fatal, ours are right. The contract suite has the traps that are no one framework's."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import tenterhook as th
from tenterhook.errors import UnsupportedError
from tests.mindspore.cells import Block, Square, WithBprop, WritesIntoItsInput, gradients, net, ones, tensor


def test_a_cell_with_its_own_bprop() -> None:
    """MindSpore: a forward hook on it never fires."""
    cell, seen = WithBprop(), []
    with th.hooks(cell) as hooks:
        hooks.forward("", lambda module, args, output: seen.append("forward"))
        hooks.backward("", lambda module, into, out: seen.append((into[0].asnumpy().item(), out[0].asnumpy().item())))
        assert gradients(lambda x: cell(x * 1) * 10, tensor(1.0)) == [70.0]
    assert seen == ["forward", (70.0, 10.0)]


def test_a_cell_that_writes_into_its_input_is_not_watched_at_its_input() -> None:
    cell = WritesIntoItsInput()
    outer = nn.SequentialCell(Square(), cell)
    with th.record(outer, tensors=True, kinds=["output", "grad_output"]) as rec:
        ms.grad(lambda x: outer(x).sum())(tensor(2.0, 3.0))
    assert rec["1"].grad_output.asnumpy().tolist() == [1.0, 1.0]
    with th.hooks(outer) as hooks:
        hooks.backward("1", lambda module, into, out: None)
        with pytest.raises(UnsupportedError, match="in place"):
            ms.grad(lambda x: outer(x).sum())(tensor(2.0, 3.0))
    with th.record(outer, kinds=["grad_input"]), pytest.raises(UnsupportedError, match="in place"):
        ms.grad(lambda x: outer(x).sum())(tensor(2.0, 3.0))
    bare = ms.grad(lambda x: outer(x).sum())(tensor(2.0, 3.0)).asnumpy().tolist()
    assert bare == [0.0, 18.0]


def test_a_tensor_that_is_written_into_after_its_cell_has_run() -> None:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Square(), nn.Identity()

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            y = self.first(x)
            y[0] = 5.0
            return self.second(y) * 3

    cell = Net()
    with th.record(cell, tensors=True, kinds=["output", "grad_output"]) as rec:
        ms.grad(lambda x: cell(x).sum())(tensor(2.0, 3.0))
    assert rec["first"].output.asnumpy().tolist() == [4.0, 9.0]
    assert rec["first"].grad_output.asnumpy().tolist() == [0.0, 3.0]
    assert rec["second"].grad_output.asnumpy().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("way", ["cell.recompute", "ms.recompute", "ms.recompute without reentry"])
def test_recomputation(way: str) -> None:
    """MindSpore: forward hooks fire twice."""
    block = Block()

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            if way == "cell.recompute":
                return self.block(x * 1)
            return ms.recompute(self.block, x * 1, **({} if way == "ms.recompute" else {"use_reentrant": False}))

    cell = Net()
    weights = cell.trainable_params()
    bare = ms.grad(lambda x: cell(x).sum(), 0, weights)(ones(2, 3))
    if way == "cell.recompute":
        block.recompute()
    with th.record(cell, kinds=["output", "grad_output"]) as rec, th.record(cell, recompute=True) as both:
        recorded = ms.grad(lambda x: cell(x).sum(), 0, weights)(ones(2, 3))
    phases = [(call.phase, call.path) for call in rec.order()]
    assert phases.count(("forward", "block.fc")) == phases.count(("backward", "block.fc")) == 1
    assert [call.phase for call in both.order() if call.path == "block.fc"].count("recompute") == 1
    assert {row["path"] for row in rec.table("modules").to_pylist()} == {"", "block", "block.fc"}
    np.testing.assert_array_equal(recorded[0].asnumpy(), bare[0].asnumpy())
    for old, new in zip(bare[1], recorded[1], strict=True):
        np.testing.assert_array_equal(new.asnumpy(), old.asnumpy())


def test_after_an_exception_in_the_forward_indexing_works() -> None:
    """MindSpore goes on recording, and an integer index fails for the rest of the process."""

    class Fails(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            raise ValueError("mine")

    cell = Fails()
    with th.hooks(cell), pytest.raises(ValueError, match="mine"):
        ms.grad(lambda x: cell(x).sum())(ones(2))
    with th.hooks(cell), pytest.raises(ValueError, match="mine"):
        ms.grad(cell)(ones(2))
    assert not cell.requires_grad
    assert ones(2)[0].asnumpy().item() == 1.0
    assert gradients(lambda x: x[0], tensor(3.0)) == [1.0]


def test_hooks_that_are_dropped_with_their_model_leave_nothing() -> None:
    call = nn.Cell.__call__
    cell = net()
    th.hooks(cell).forward("**", lambda module, args, output: None)
    gone = weakref.ref(cell)
    assert nn.Cell.__call__ is not call
    del cell
    gc.collect()
    assert gone() is None
    assert nn.Cell.__call__ is call


def test_a_copy_made_during_a_session_works_on_its_own() -> None:
    cell, seen = net(), []
    with th.hooks(cell) as hooks:
        hooks.forward("0", lambda module, args, output: seen.append(1))
        twin = copy.deepcopy(cell)
        with th.hooks(twin) as others:
            others.forward("0", lambda module, args, output: seen.append(2))
            twin(ones(1, 3))
    assert seen == [2]


def test_threads_have_calls_of_their_own() -> None:
    """One after the other: MindSpore itself does not survive two threads at the same time."""
    cell = net()
    weights = cell.trainable_params()
    with th.record(cell) as rec:
        for _ in range(2):
            thread = threading.Thread(target=ms.grad(lambda x: cell(x).sum(), None, weights), args=(ones(2, 3),))
            thread.start()
            thread.join()
    rows = sorted(rec.table("calls").to_pylist(), key=lambda row: row["seq"])
    assert [row["depth"] for row in rows] == [0, 1, 1, 1, 2, 0, 1, 2, 1, 1] * 2


def test_a_call_that_an_interrupt_has_ended_is_not_taken_for_the_parent_of_the_next() -> None:
    class Interrupted(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            if raises:
                raise KeyboardInterrupt
            return x * 2

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.part = Interrupted()

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.part(x)

    cell, raises = Net(), [True]
    with th.record(cell) as rec:
        with pytest.raises(KeyboardInterrupt):
            cell(ones(2))
        raises.clear()
        cell(ones(2))
    assert [(call.path, call.depth) for call in rec.order()] == [("", 0), ("part", 1)] * 2


def test_a_cell_is_watched_in_the_mode_that_it_is_in() -> None:
    """MindSpore's cells begin in inference mode."""
    cell = nn.SequentialCell(nn.Dense(3, 3), nn.BatchNorm1d(3))
    for mode in (False, True):
        cell.set_train(mode)
        before = cell[1].moving_mean.asnumpy().copy()
        with th.record(cell, kinds=["grad_input", "output"]), th.hooks(cell) as hooks:
            hooks.backward("**", lambda module, into, out: None)
            cell(ms.Tensor(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)))
        assert cell.training is cell[1].training is mode
        assert np.array_equal(before, cell[1].moving_mean.asnumpy()) is not mode


@pytest.mark.parametrize("alone", [True, False])
def test_parameters_go_by_the_names_of_their_attributes(alone: bool) -> None:
    """MindSpore: ``moving_mean`` of a BatchNorm is called ``mean`` where it stands alone, and a shared one bears its last path."""
    norm = nn.BatchNorm1d(2)
    cell = norm if alone else nn.SequentialCell(norm, nn.SequentialCell(norm))
    with th.record(cell, kinds=["param"]) as rec:
        cell(ones(3, 2))
    rows = rec.query("select path, slot from values where kind = 'param'").to_pylist()
    assert {(row["path"], row["slot"]) for row in rows} == {
        ("" if alone else "0", name) for name in ("gamma", "beta", "moving_mean", "moving_variance")
    }
    assert len(rows) == 4
