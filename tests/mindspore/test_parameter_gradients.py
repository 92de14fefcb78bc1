"""Gradients of parameters, which MindSpore knows as return values only: every way in which they come about, or are given away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn, ops

import tenterhook as th
from tests.mindspore.cells import net

_random = np.random.default_rng(5)
X, Y = _random.normal(size=(4, 3)).astype(np.float32), _random.normal(size=(4, 2)).astype(np.float32)
LOSS = nn.MSELoss()
NAMES = ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]


def model() -> nn.Cell:
    cell = net()
    for number, parameter in enumerate(cell.get_parameters()):
        values = np.random.default_rng(number).normal(size=parameter.shape)
        parameter.set_data(ms.Tensor(values.astype(np.float32)))
    return cell


def bare_gradients(cell: nn.Cell) -> list[np.ndarray]:
    found = ms.grad(lambda x, y: LOSS(cell(x), y), None, list(cell.trainable_params()))(ms.Tensor(X), ms.Tensor(Y))
    return [gradient.asnumpy().copy() for gradient in found]


def value_and_grad(cell: nn.Cell, optimizer: Any) -> None:
    _, found = ms.value_and_grad(lambda x, y: LOSS(cell(x), y), None, optimizer.parameters)(ms.Tensor(X), ms.Tensor(Y))
    optimizer(found)


def inputs_too(cell: nn.Cell, optimizer: Any) -> None:
    step = ms.value_and_grad(lambda x, y: LOSS(cell(x), y), 0, optimizer.parameters)
    _, (_, found) = step(ms.Tensor(X), ms.Tensor(Y))
    optimizer(found)


def has_aux(cell: nn.Cell, optimizer: Any) -> None:
    step = ms.grad(lambda x, y: (LOSS(cell(x), y), x), None, optimizer.parameters, has_aux=True)
    found, _ = step(ms.Tensor(X), ms.Tensor(Y))
    optimizer(found)


def grad_operation(cell: nn.Cell, optimizer: Any) -> None:
    step = ops.GradOperation(get_by_list=True)(nn.WithLossCell(cell, LOSS), optimizer.parameters)
    optimizer(step(ms.Tensor(X), ms.Tensor(Y)))


def with_grad_cell(cell: nn.Cell, optimizer: Any) -> None:
    optimizer(nn.WithGradCell(cell, LOSS)(ms.Tensor(X), ms.Tensor(Y)))


def forward_value_and_grad(cell: nn.Cell, optimizer: Any) -> None:
    step = nn.ForwardValueAndGrad(nn.WithLossCell(cell, LOSS), weights=optimizer.parameters, get_by_list=True)
    optimizer(step(ms.Tensor(X), ms.Tensor(Y))[1])


def vjp(cell: nn.Cell, optimizer: Any) -> None:
    _, backward = ms.vjp(lambda x: LOSS(cell(x), ms.Tensor(Y)), ms.Tensor(X), weights=optimizer.parameters)
    optimizer(backward(ms.Tensor(np.float32(1)))[1])


def as_arguments(cell: nn.Cell, optimizer: Any) -> None:
    def loss(w0: Any, b0: Any, w1: Any, b1: Any) -> Any:
        return LOSS(ops.dense(ops.relu(ops.dense(ms.Tensor(X), w0, b0)), w1, b1), ms.Tensor(Y))

    optimizer(ms.grad(loss, (0, 1, 2, 3))(*optimizer.parameters))


def train_one_step(cell: nn.Cell, optimizer: Any) -> None:
    nn.TrainOneStepCell(nn.WithLossCell(cell, LOSS), optimizer).set_train()(ms.Tensor(X), ms.Tensor(Y))


def model_train(cell: nn.Cell, optimizer: Any) -> None:
    data = ds.NumpySlicesDataset({"x": X, "y": Y}, shuffle=False).batch(4)
    ms.train.Model(cell, LOSS, optimizer).train(1, data, dataset_sink_mode=False)


def compiled_step(cell: nn.Cell, optimizer: Any) -> None:
    step = ms.value_and_grad(lambda x, y: LOSS(cell(x), y), None, optimizer.parameters)
    ms.jit(lambda x, y: optimizer(step(x, y)[1]))(ms.Tensor(X), ms.Tensor(Y))


WAYS: list[Callable[[nn.Cell, Any], None]] = [
    value_and_grad, inputs_too, has_aux, grad_operation, with_grad_cell, forward_value_and_grad, vjp, as_arguments,
    train_one_step, model_train, compiled_step,
]  # fmt: skip


def recorded(rec: Any) -> dict[str, np.ndarray]:
    """The gradients of a recording of one step by the names of their parameters."""
    rows = rec.query(
        "select path || '.' || slot as name, step, tensor from values where kind = 'param_grad'"
    ).to_pylist()
    assert [row["step"] for row in rows] == [0] * len(rows)
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: rec.recording.tensor(row["tensor"]).asnumpy() for row in rows}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_of_training_shows_them_once(way: Callable[[nn.Cell, Any], None]) -> None:
    cell = model()
    expected = dict(zip(NAMES, bare_gradients(cell), strict=True))
    hooked: dict[str, np.ndarray] = {}
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    with th.record(cell, kinds=["param_grad"], tensors=True) as rec, th.hooks(cell) as hooks:
        handle = hooks.param_grad("**", lambda name, gradient: hooked.update({name: gradient.asnumpy().copy()}))
        way(cell, optimizer)
    assert handle.fired == 4
    for seen in (recorded(rec), hooked):
        assert seen.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(seen[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_of_training_uses_what_a_hook_returns(way: Callable[[nn.Cell, Any], None]) -> None:
    cell = model()
    before = [parameter.asnumpy().copy() for parameter in cell.get_parameters()]
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    with th.hooks(cell) as hooks:
        hooks.param_grad("**.weight", lambda name, gradient: gradient * 0)
        way(cell, optimizer)
    moved = [not np.array_equal(old, new.asnumpy()) for old, new in zip(before, cell.get_parameters(), strict=True)]
    assert moved == [False, True, False, True]


# ---- those that no backward pass shows ----


def given(values: float = 1.0) -> tuple[ms.Tensor, ...]:
    return tuple(
        ms.Tensor(np.full(one.shape, values + place, np.float32)) for place, one in enumerate(model().get_parameters())
    )


@pytest.mark.parametrize("forward", [True, False])
def test_gradients_from_elsewhere_are_taken_from_the_optimizers_call(forward: bool) -> None:
    cell = model()
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    with th.record(cell, kinds=["param_grad", "output"], tensors=True) as rec:
        if forward:
            cell(ms.Tensor(X))
        optimizer(given())
    seen = recorded(rec)
    assert {name: set(gradient.ravel()) for name, gradient in seen.items()} == {
        name: {1.0 + place} for place, name in enumerate(NAMES)
    }


def test_a_hook_on_gradients_from_elsewhere_changes_what_the_optimizer_gets() -> None:
    cell, other = model(), model()
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    with th.hooks(cell) as hooks, th.edit(cell) as edit:
        handle = hooks.param_grad("0.weight", lambda name, gradient: gradient + 1)
        edit.param_grad("0.*", th.edits.scale(3.0))
        optimizer(given())
    assert handle.fired == 1
    expected = list(given())
    expected[:2] = [expected[0] * 3 + 1, expected[1] * 3]
    nn.SGD(other.trainable_params(), 0.1)(tuple(expected))
    for one, twin in zip(cell.get_parameters(), other.get_parameters(), strict=True):
        np.testing.assert_array_equal(one.asnumpy(), twin.asnumpy())


def test_gradients_that_were_summed_by_hand_are_not_shown_twice() -> None:
    cell = model()
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    backward = ms.grad(lambda x, y: LOSS(cell(x), y), None, optimizer.parameters)
    with th.hooks(cell) as hooks:
        handle = hooks.param_grad("0.weight", lambda name, gradient: None)
        for _ in range(2):
            first, second = (backward(ms.Tensor(X), ms.Tensor(Y)) for _ in range(2))
            optimizer(tuple(one + other for one, other in zip(first, second, strict=True)))
        assert handle.fired == 4
        optimizer(given())
        assert handle.fired == 5


def test_a_parameter_that_the_loss_does_not_depend_on_has_the_zeros_that_mindspore_gives_it() -> None:
    """torch gives it no gradient; here the optimizer gets these zeros."""

    class Half(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Dense(3, 2), nn.Dense(3, 2)

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            self.unused(x)
            return self.used(x)

    cell = Half()
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    with th.record(cell, kinds=["param_grad", "grad_output"], tensors=True) as rec:
        value_and_grad(cell, optimizer)
    assert {name: bool(gradient.any()) for name, gradient in recorded(rec).items()} == {
        "used.weight": True, "used.bias": True, "unused.weight": False, "unused.bias": False,
    }  # fmt: skip
    assert "unused: no gradient: not used by what was differentiated" in str(rec.coverage)


def test_where_there_is_neither_a_backward_pass_nor_an_optimizer_that_is_told() -> None:
    cell = model()
    with th.record(cell, kinds=["param_grad"]) as rec:
        cell(ms.Tensor(X))
    assert recorded(rec) == {}
    assert "0, 2.0: no gradient of weight, bias: no backward pass reached it" in str(rec.coverage)


def test_an_optimizer_inside_another_is_not_taken_for_a_step_of_its_own() -> None:
    cell = model()

    class Halving(nn.Optimizer):
        def __init__(self, inner: nn.Optimizer) -> None:
            super().__init__(0.1, list(inner.parameters))
            self.inner = inner

        def construct(self, gradients: tuple[ms.Tensor, ...]) -> Any:
            return self.inner(tuple(one / 2 for one in gradients))

    optimizer = Halving(nn.SGD(cell.trainable_params(), 0.1))
    with th.record(cell, kinds=["param_grad"], tensors=True) as rec:
        optimizer(given())
    assert set(recorded(rec)["0.weight"].ravel()) == {1.0}


def test_hooks_that_are_gone_are_shown_nothing() -> None:
    cell = model()
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    with th.hooks(cell) as hooks:
        handle = hooks.param_grad("**", lambda name, gradient: None)
        handle.remove()
        optimizer(given())
        assert handle.fired == 0
    assert th.installed_hooks(cell) == []


def test_a_shared_parameter_in_cells_that_recompute_has_one_gradient() -> None:
    class Block(nn.Cell):
        def __init__(self, fc: nn.Cell) -> None:
            super().__init__()
            self.fc = fc

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.fc(x) * 2

    shared = nn.Dense(3, 3)
    cell = nn.SequentialCell(Block(shared), Block(shared))
    for block in cell:
        block.recompute()
    weights = cell.trainable_params()
    with th.record(cell, kinds=["param_grad"], tensors=True) as rec, th.hooks(cell) as hooks:
        handle = hooks.param_grad("**", lambda name, gradient: None)
        came = ms.grad(lambda x: cell(x).sum(), None, weights)(ms.Tensor(X))
    assert handle.fired == 2
    seen = recorded(rec)
    for gradient, name in zip(came, ("0.fc.weight", "0.fc.bias"), strict=True):
        np.testing.assert_array_equal(seen[name], gradient.asnumpy())


def test_clipping_together_is_clip_by_global_norm_before_the_optimizer() -> None:
    written, edited = model(), model()
    optimizer = nn.Momentum(written.trainable_params(), 0.5, 0.9)
    for _ in range(2):
        _, found = ms.value_and_grad(lambda x, y: LOSS(written(x), y), None, optimizer.parameters)(
            ms.Tensor(X), ms.Tensor(Y)
        )
        optimizer(ops.clip_by_global_norm(found, 0.25))
    optimizer = nn.Momentum(edited.trainable_params(), 0.5, 0.9)
    with th.edit(edited) as edit:
        handle = edit.param_grad("**", th.edits.clip_norm(0.25, together=True))
        for _ in range(2):
            value_and_grad(edited, optimizer)
    assert handle.fired == 2
    for mine, theirs in zip(edited.get_parameters(), written.get_parameters(), strict=True):
        assert np.array_equal(mine.asnumpy(), theirs.asnumpy())
    assert not np.array_equal(
        next(iter(edited.get_parameters())).asnumpy(), next(iter(model().get_parameters())).asnumpy()
    )
