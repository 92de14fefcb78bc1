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
