"""``ops=True``: functional calls between cells, as far as MindSpore shows them."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import mint, nn, ops

import tenterhook as th
from tests.mindspore.cells import ones


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 3)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        y = ops.relu(x + 1)
        y = self.fc(y) @ y.T
        return ops.relu(y).sum()


def paths(rec: th.Recorder) -> list[str]:
    return [f"{call.path}#{call.call}" for call in rec.order() if call.phase == "forward"]


def test_functional_calls_have_a_place_a_line_and_values() -> None:
    cell = Net()
    with th.record(cell, ops=True, tensors=True, kinds=["output"]) as rec:
        out = ms.value_and_grad(cell, None, cell.trainable_params())(ones(2, 3))[0]
    assert paths(rec) == [
        "#0", "(root)/add#0", "(root)/relu#0", "fc#0", "(root)/transpose#0", "(root)/matmul#0", "(root)/relu#1", "(root)/sum#0",
    ]  # fmt: skip
    assert rec.query("select mean from values where path = '(root)/add'").to_pylist() == [{"mean": 2.0}]
    assert rec["(root)/sum"].output.asnumpy() == out.asnumpy()
    sources = {row["source"] for row in rec.table("modules").to_pylist() if row["path"].startswith("(root)/")}
    assert all(source is None or __file__ in source for source in sources)


class Diamond(nn.Cell):
    """``relu`` gives what two later calls use, and what the cell returns as it is."""

    def construct(self, x: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        y = ops.relu(x * 2)
        same = y.view(y.shape)
        return y, (same * 5 + y * 3).sum()


@pytest.mark.parametrize("synchronize", [True, False])
def test_gradients_of_functional_calls(synchronize: bool) -> None:
    cell = Diamond()

    def loss(x: ms.Tensor) -> ms.Tensor:
        y, z = cell(x)
        return (y * 7).sum() + z

    ms.set_context(pynative_synchronize=synchronize)
    try:
        with th.record(cell, ops=True, tensors=True) as rec:
            ms.grad(loss)(ms.Tensor([[1.0, -2.0]]))
    finally:
        ms.set_context(pynative_synchronize=True)
    ops_of = {f"{name}#{call.call}": call for name in ("mul", "relu", "add", "sum", "reshape") for call in
              rec[f"(root)/{name}"].calls if call.phase == "forward"}  # fmt: skip
    assert {name: call.grad_output.asnumpy().tolist() for name, call in ops_of.items()} == {
        "mul#0": [[15.0, 0.0]],
        "relu#0": [[15.0, 15.0]],
        "reshape#0": [[5.0, 5.0]],
        "mul#1": [[1.0, 1.0]],
        "mul#2": [[1.0, 1.0]],
        "add#0": [[1.0, 1.0]],
        "sum#0": 1.0,
    }
    backward = [call.path for call in rec.order() if call.phase == "backward"]
    assert backward[0] == "" and backward[-1] == "(root)/mul"


def test_a_cell_comes_before_the_functional_call_whose_result_it_returns() -> None:
    class Both(nn.Cell):
        def construct(self, x: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
            y = ops.relu(x)
            return y, y + 1  # the addition meets the result before the cell has ended

    cell = nn.SequentialCell(Both())
    with th.record(cell, ops=True) as rec:
        ms.grad(lambda x: cell(x)[0].sum())(ones(2))
    assert [call.path for call in rec.order() if call.phase == "backward"] == ["", "0", "0/relu"]


def test_calls_that_are_alike_get_each_its_own_gradient_or_none() -> None:
    class Views(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            y = x * 1
            first, second = y.view(y.shape), y.view(y.shape)
            ops.relu(y)  # leads nowhere, and looks as the next does
            return (second * 3 + first * 5).sum() + ops.relu(y).sum()

    cell = Views()
    with th.record(cell, ops=True, tensors=True) as rec:
        ms.grad(cell)(ones(2))
    backward = [call for call in rec.order() if call.phase == "backward"]
    views = {call.call: call.grad_output.asnumpy().tolist() for call in backward if call.path == "(root)/reshape"}
    assert views == {0: [5.0, 5.0], 1: [3.0, 3.0]}
    assert "(root)/relu" not in {call.path for call in backward}
    (mul,) = (call for call in backward if call.path == "(root)/mul" and call.call == 0)
    assert mul.grad_output.asnumpy().tolist() == [9.0, 9.0]


def test_what_is_missed_is_told() -> None:
    class Takes(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return mint.cat([x, x])[0]

    cell = Takes()
    with th.record(cell, ops=True) as rec:
        cell(ones(2, 3))
    assert paths(rec) == ["#0", "(root)/concat#0"]
    assert any("no indexing" in sentence for sentence in rec.told)


def test_gradients_are_those_without_it_and_the_mode_is_off_afterwards() -> None:
    cell, seen = Net(), []
    weights = cell.trainable_params()
    bare = ms.grad(cell, 0, weights)(ones(2, 3))
    with th.record(cell, ops=True) as rec:
        recorded = ms.grad(cell, 0, weights)(ones(2, 3))
        calls = len(rec.order())
        ops.relu(ones(2))
        seen.append(len(rec.order()) - calls)
    assert seen == [0]
    assert (recorded[0].asnumpy() == bare[0].asnumpy()).all()
    for before, after in zip(bare[1], recorded[1], strict=True):
        assert (after.asnumpy() == before.asnumpy()).all()


def test_an_error_in_the_model_leaves_the_mode() -> None:
    class Fails(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            ops.relu(x)
            raise ValueError("mine")

    cell = Fails()
    with th.record(cell, ops=True) as rec:
        with pytest.raises(ValueError, match="mine"):
            cell(ones(2))
        calls = len(rec.order())
        ops.relu(ones(2))
        assert len(rec.order()) == calls
