"""Where MindSpore's own hooks are mute, wrong or fatal, ours are right. The contract suite has the traps that are no one framework's."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

import tenterhook as th
from tenterhook.errors import UnsupportedError
from tests.mindspore.cells import Block, Square, WithBprop, WritesIntoItsInput, dense, gradients, net, ones, tensor


def test_a_cell_with_its_own_bprop() -> None:
    """MindSpore: a forward hook on it never fires."""
    cell, seen = WithBprop(), []
    with th.hooks(cell) as hooks:
        hooks.forward("", lambda module, args, output: seen.append("forward"))
        hooks.backward("", lambda module, into, out: seen.append((into[0].asnumpy().item(), out[0].asnumpy().item())))
        assert gradients(lambda x: cell(x * 1) * 10, tensor(1.0)) == [70.0]
    assert seen == ["forward", (70.0, 10.0)]


def test_an_edit_on_a_shared_cell_changes_what_it_says_and_nothing_else() -> None:
    """MindSpore: a backward hook that returns zeros turns the weight gradient from 11 into 10."""
    cell = dense(2.0)
    weights = cell.trainable_params()
    with th.hooks(cell) as hooks:
        hooks.backward_pre("", lambda module, out: (out[0] * 0,) if out[0].asnumpy().item() == 1 else None)
        (of_weight,) = ms.grad(lambda a, b: (cell(a) + cell(b) * 10).sum(), None, weights)(ones(1, 1), ones(1, 1))
    assert of_weight.asnumpy().item() == 10.0


def test_a_tensor_that_needs_no_gradient_is_left_unmarked() -> None:
    """MindSpore: registering a hook makes it need one."""
    cell, x = net(), ones(2, 3)
    with th.record(cell, kinds=["input", "output", "grad_input", "grad_output"]), th.hooks(cell) as hooks:
        hooks.backward("**", lambda module, into, out: None)
        out = cell(x)
        with pytest.raises(th.TenterhookError, match="value_and_grad"):
            hooks.tensor(x, lambda gradient: None)
    assert not x._requires_grad and not out._requires_grad


def test_an_integer_result_is_not_waited_for() -> None:
    """MindSpore says that it needs a gradient, which never comes."""

    class Best(nn.Cell):
        def construct(self, x: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
            return x * 2, ops.argmax(x)

    cell, seen = Best(), []
    with th.hooks(cell) as hooks:
        hooks.backward_pre("", lambda module, out: seen.append([gradient is None for gradient in out]))
        ms.grad(lambda x: cell(x)[0].sum())(tensor(1.0, 2.0))
    assert seen == [[False, True]]


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


@pytest.mark.parametrize("make", ["attention", "transformer", "lstm"])
def test_gradients_of_real_layers_stay_bit_for_bit_the_same(make: str) -> None:
    ms.set_seed(3)
    x = ms.Tensor(np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32))
    if make == "attention":
        layer: Any = nn.MultiheadAttention(8, 2, batch_first=True)
        run = lambda x: layer(x, x, x)[0].sum()  # noqa: E731
    elif make == "transformer":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        run = lambda x: layer(x).sum()  # noqa: E731
    else:
        layer = nn.LSTM(8, 4, batch_first=True)
        run = lambda x: layer(x)[0].sum()  # noqa: E731
    weights = layer.trainable_params()
    bare = ms.value_and_grad(run, 0, weights)(x)
    with th.record(layer, kinds=["input", "output", "grad_input", "grad_output", "param_grad"]) as rec:
        recorded = ms.value_and_grad(run, 0, weights)(x)
    assert rec.query("select count(*) as n from values where kind = 'param_grad'").to_pylist() == [{"n": len(weights)}]
    assert recorded[0].asnumpy() == bare[0].asnumpy()
    for old, new in zip((bare[1][0], *bare[1][1]), (recorded[1][0], *recorded[1][1]), strict=True):
        np.testing.assert_array_equal(new.asnumpy(), old.asnumpy())
    if make == "attention":
        reasons = {row["path"]: row["reason"] for row in rec.table("modules").to_pylist()}
        assert reasons["out_proj"] == "weights used without calling the cell"


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


def test_an_exception_that_the_model_catches_leaves_its_gradients_alone() -> None:
    class Fails(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            raise ValueError("mine")

    cell = Fails()

    def careful(x: ms.Tensor) -> ms.Tensor:
        y = x * 3
        try:
            return cell(y)
        except ValueError:
            return y * 2

    with th.hooks(cell) as hooks:
        hooks.backward("", lambda module, into, out: None)
        assert gradients(careful, tensor(1.0)) == [6.0]


def test_a_gradient_of_a_gradient() -> None:
    cell, tokens = Square(), []
    with th.hooks(cell) as hooks:
        hooks.backward_pre("", lambda module, out: tokens.append(out[0].asnumpy().item()))
        inner = ms.grad(lambda x: (cell(x) * x).sum())
        assert ms.grad(lambda x: inner(x).sum())(tensor(2.0)).asnumpy().item() == 12.0
    assert tokens[0] == 2.0


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


def test_hooks_on_a_tensor_that_is_used_again_do_not_add_up() -> None:
    """MindSpore: a hook on a tensor stays on it, so that the second call fires twice."""
    cell, x, seen = nn.Identity(), tensor(3.0), []
    square = Square()
    with th.record(cell) as rec, th.hooks(cell) as hooks:
        hooks.backward_pre("", lambda module, out: seen.append(out[0].asnumpy().item()))
        for _ in range(3):
            ms.grad(lambda x: square(cell(x)).sum())(x)
    assert seen == [6.0] * 3
    rows = rec.query("select mean from values where kind = 'grad_output'").to_pylist()
    assert [row["mean"] for row in rows] == [6.0] * 3
    assert ms.grad(lambda x: square(x).sum())(x).asnumpy().item() == 6.0
    assert seen == [6.0] * 3


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


def test_a_result_of_several_tensors_of_which_one_is_used() -> None:
    """MindSpore: one hook of a cell sees the gradients of the top level of its output only."""

    class Parts(nn.Cell):
        def construct(self, x: ms.Tensor) -> tuple[ms.Tensor, tuple[ms.Tensor, ms.Tensor]]:
            first, second = ops.split(x * 1, 1)
            return x * 2, (first, second)

    cell, seen = Parts(), []
    with th.hooks(cell) as hooks:
        hooks.backward_pre(
            "", lambda module, out: seen.append([None if g is None else g.asnumpy().tolist() for g in out])
        )
        ms.grad(lambda x: (cell(x)[1][1] * 5).sum())(tensor(1.0, 2.0))
    assert seen == [[None, None, [5.0]]]


def test_two_passes_of_which_the_first_fails_in_a_hook() -> None:
    """MindSpore: after an exception the next backward pass calls the hook twice, with garbage."""
    cell, seen, fails = nn.SequentialCell(Square(), Square()), [], [True]

    def fail_once(module: nn.Cell, into: Any, out: Any) -> None:
        seen.append((into[0].asnumpy().item(), out[0].asnumpy().item()))
        if fails:
            fails.clear()
            raise ValueError("mine")

    with th.record(cell, kinds=["grad_output"]) as rec, th.hooks(cell) as hooks:
        hooks.backward("0", fail_once)
        for _ in range(3):
            try:
                assert gradients(cell, tensor(2.0)) == [32.0]
            except ValueError:
                assert seen == [(32.0, 8.0)]
    assert seen == [(32.0, 8.0)] * 3
    rows = rec.query("select path, mean from values where kind = 'grad_output' and path = '1' order by seq").to_pylist()
    assert [row["mean"] for row in rows] == [1.0] * 3


def _chain() -> nn.Cell:
    return nn.SequentialCell(nn.Dense(3, 3), nn.Tanh(), nn.Dense(3, 2))


def _marked(cell: nn.Cell) -> nn.Cell:
    cell.set_grad()
    return cell


DIFFERENTIATED: dict[str, Any] = {
    "ms.grad": lambda cell, x: ms.grad(cell, 0, cell.trainable_params())(x),
    "value_and_grad": lambda cell, x: ms.value_and_grad(cell, 0, cell.trainable_params())(x),
    "GradOperation": lambda cell, x: ops.GradOperation(get_all=True, get_by_list=True)(cell, cell.trainable_params())(
        x
    ),
    "with the gradient of the output": lambda cell, x: ops.GradOperation(get_all=True, sens_param=True)(cell)(
        x, ms.Tensor(np.float32([[2, 3], [4, 5]]))
    ),
    "set_grad": lambda cell, x: ops.GradOperation(get_all=True)(_marked(cell))(x),
    "run before": lambda cell, x: (_marked(cell)(x), ops.GradOperation(get_all=True)(cell)(x))[1],
    "twice": lambda cell, x: [ms.grad(cell)(x), ms.grad(cell, 0, cell.trainable_params())(x)],
    "vjp": lambda cell, x: ms.vjp(cell, x)[1](ms.Tensor(np.float32([[2, 3], [4, 5]]))),
    "gradient of a gradient": lambda cell, x: ms.grad(lambda a: (ms.grad(cell)(a) ** 2).sum())(x),
    "third": lambda cell, x: ms.grad(lambda a: (ms.grad(lambda b: (ms.grad(cell)(b) ** 2).sum())(a) ** 2).sum())(x),
}


def _flat(value: Any) -> list[np.ndarray]:
    return [value.asnumpy()] if isinstance(value, ms.Tensor) else [one for part in value for one in _flat(part)]


@pytest.mark.parametrize("way", DIFFERENTIATED)
def test_a_cell_that_is_differentiated_itself(way: str) -> None:
    """MindSpore begins the graph inside its call; and of a gradient of a gradient it makes something else where there is a view."""
    cell, x = _chain(), ms.Tensor(np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32))
    run = DIFFERENTIATED[way]
    bare = _flat(run(cell, x))
    flags = [one.requires_grad for _, one in cell.cells_and_names()]
    cell.set_grad(False)
    seen: list[np.ndarray] = []
    kinds = ["input", "output", "grad_input", "grad_output"]
    with th.record(cell, kinds=kinds) as rec, th.hooks(cell) as hooks:
        hooks.backward("", lambda module, into, out: seen.append(None if into[0] is None else into[0].asnumpy().copy()))
        came = _flat(run(cell, x))
    assert rec.recording.manifest.partial is None
    assert [one.requires_grad for _, one in cell.cells_and_names()] == flags
    for one, other in zip(came, bare, strict=True):
        np.testing.assert_array_equal(one, other)
    if way not in ("gradient of a gradient", "third", "run before"):
        of_input = came[1] if way == "value_and_grad" else came[0]
        np.testing.assert_array_equal(seen[0], of_input)


# ---- 13: retain_grad has no kernel on the CPU ----


@pytest.mark.parametrize("watched", [False, True])
def test_a_retained_gradient_fails_in_a_session_as_it_does_bare(watched: bool) -> None:
    class Retains(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            y = x * 2
            y._retain_grad()
            kept.append(y)
            return y * 3

    kept: list[ms.Tensor] = []
    cell, x = Retains(), ms.Tensor(np.ones(2, np.float32))
    with th.record(cell) if watched else contextlib.nullcontext() as rec:
        with pytest.raises(RuntimeError, match="Clone"):
            ms.value_and_grad(lambda x: cell(x).sum())(x)[1].asnumpy()
        assert ms.grad(lambda x: (x * 3).sum())(x).asnumpy().tolist() == [3.0, 3.0]
    if rec is not None:
        assert [call.phase for call in rec.order()][:1] == ["forward"]
    assert not th.installed_hooks(cell)
