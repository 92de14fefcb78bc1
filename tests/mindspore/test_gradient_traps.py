"""Where MindSpore's own hooks make gradients wrong, or see wrong ones, ours are right. Other traps are in `test_traps.py`."""

from __future__ import annotations

import contextlib
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

import tenterhook as th
from tests.mindspore.cells import Square, dense, gradients, net, ones, tensor


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
