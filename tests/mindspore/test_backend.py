"""What is changed in MindSpore while somebody watches, that it is put back, and what is refused or told."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.graph import api, jit_trace
from mindspore.graph._utils import pijit_context
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

import tenterhook as th
from tenterhook.errors import UnsupportedError
from tests.mindspore.cells import net, ones, tensor

PLACES: list[tuple[Any, str]] = [
    (nn.Cell, "__call__"),
    (api._PyNativeExecutor, "grad"),
    (api._PyNativeExecutor, "set_is_run_recompute"),
    (api._JitExecutor, "__call__"),
    (pijit_context.PIJitCaptureContext, "__enter__"),
    (jit_trace, "_jit_trace_begin"),
    (base, "_pynative_func_grad_forward"),
    (grad_func, "_pynative_func_grad_forward"),
]
ORIGINALS = [vars(owner)[name] for owner, name in PLACES]


def changed() -> list[bool]:
    return [vars(owner)[name] is not original for (owner, name), original in zip(PLACES, ORIGINALS, strict=True)]


# ---- the seams ----


def test_mindspore_is_changed_for_a_session_only() -> None:
    cell = net()
    assert not any(changed())
    with th.hooks(cell) as outer:
        assert all(changed())
        with th.record(cell):
            cell(ones(1, 3))
        assert all(changed())
        outer.forward("**", lambda module, args, output: None)
    assert not any(changed())
    assert not [name for one in cell.cells_and_names() for name in vars(one[1]) if "tenterhook" in name]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_mindspore_is_put_back_after_an_error(error: type[BaseException]) -> None:
    cell = net()
    with pytest.raises(error), th.record(cell, kinds=["grad_input", "output"]):
        cell(ones(1, 3))
        raise error
    assert not any(changed())


def test_somebody_else_who_swaps_after_us_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, seen = net(), []
    hooks = th.hooks(cell)
    hooks.forward("0", lambda module, args, output: seen.append("ours"))
    ours = nn.Cell.__call__

    def theirs(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        seen.append("theirs")
        return ours(self, *args, **kwargs)

    nn.Cell.__call__ = theirs
    try:
        cell[0](ones(1, 3))
        hooks.close()
        assert nn.Cell.__call__ is theirs
        cell[0](ones(1, 3))
        assert seen == ["theirs", "ours", "theirs"]
        with th.hooks(cell) as again:
            again.forward("0", lambda module, args, output: seen.append("again"))
            cell[0](ones(1, 3))
        assert seen[3:] == ["theirs", "again"]
    finally:
        nn.Cell.__call__ = ours
        th.hooks(cell).close()
    assert not any(changed())


# ---- names ----


def test_training_cells_lend_no_names() -> None:
    model = net()
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    trainer = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), optimizer)
    with th.record(trainer) as rec:
        trainer(ones(2, 3), ones(2, 2))
    rows = {row["path"]: (row["raw_path"], row["calls"]) for row in rec.table("modules").to_pylist()}
    assert rows == {
        "": ("network._backbone", 1),
        "0": ("network._backbone.0", 1),
        "1": ("network._backbone.1", 1),
        "2": ("network._backbone.2", 1),
        "2.0": ("network._backbone.2.0", 1),
        "_loss_fn": ("network._loss_fn", 1),
    }


def test_containers_that_are_never_called_are_no_places_for_hooks() -> None:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.CellList([nn.ReLU(), nn.ReLU()])

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            for item in self.items:
                x = item(x)
            return x

    cell = Net()
    with th.record(cell, kinds=["output"]) as rec:
        cell(ones(2))
    assert rec.coverage.complete
    with th.hooks(cell) as hooks, pytest.raises(th.TenterhookError, match="items"):
        hooks.forward("items", lambda module, args, output: None)


# ---- graph mode and ms.jit ----


@pytest.fixture
def graph_mode() -> Iterator[None]:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)


@pytest.mark.parametrize("open_session", [th.hooks, th.record])
def test_graph_mode_is_refused(open_session: Callable[[Any], Any], graph_mode: None) -> None:
    with pytest.raises(UnsupportedError, match="PYNATIVE_MODE"):
        open_session(net())
    assert not any(changed())


def test_a_switch_to_graph_mode_during_a_session_is_told(caplog: pytest.LogCaptureFixture) -> None:
    cell = nn.ReLU()
    with th.record(cell), caplog.at_level(logging.WARNING, "tenterhook"):
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            cell(ones(2))
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
    assert "ReLU ran in graph mode" in caplog.text


class Compiled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 3)

    @ms.jit
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.fc(x) * 2


def test_compiled_cells_run_eager_while_watched_and_that_is_said() -> None:
    cell = Compiled()
    before = cell(ones(2, 3)).asnumpy()
    with th.record(cell) as rec:
        during = cell(ones(2, 3)).asnumpy()
    assert [call.path for call in rec.order()] == ["", "fc"]
    assert rec.told == [
        "Compiled.construct is compiled by ms.jit; it runs eager while it is watched: compiled code calls no hooks"
    ]
    np.testing.assert_allclose(during, before, rtol=1e-6)
    np.testing.assert_array_equal(cell(ones(2, 3)).asnumpy(), before)


def test_a_compiled_cell_that_is_left_as_it_is_has_its_inside_in_coverage() -> None:
    cell = Compiled()
    with th.record(cell, fused="keep") as rec:
        cell(ones(2, 3))
    assert dict(rec.coverage.missing)["fc"] == "inside a cell that ms.jit compiles: compiled code calls no hooks"


@pytest.mark.parametrize("way", ["jit of the cell", "jit of a function"])
def test_what_was_compiled_from_outside_is_seen_too(way: str, caplog: pytest.LogCaptureFixture) -> None:
    cell = net()
    compiled = ms.jit(cell) if way == "jit of the cell" else ms.jit(lambda x: cell(x))  # noqa: PLW0108  # a function that calls it
    with th.record(cell) as rec, caplog.at_level(logging.WARNING, "tenterhook"):
        compiled(ones(2, 3))
    assert [call.path for call in rec.order()] == ["", "0", "1", "2", "2.0"]
    assert "runs eager while it is watched" in caplog.text


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="MindSpore compiles from bytecode up to Python 3.11 only")
def test_what_was_compiled_from_bytecode_is_seen_too() -> None:
    cell = net()
    compiled = ms.jit(lambda x: cell(x), capture_mode="bytecode")  # noqa: PLW0108
    compiled(ones(2, 3))
    with th.record(cell) as rec:
        compiled(ones(2, 3))
    assert [call.path for call in rec.order()] == ["", "0", "1", "2", "2.0"]
    assert any("runs eager" in sentence for sentence in rec.told)


TRACED = """
import mindspore as ms, numpy as np
from mindspore import nn
import tenterhook as th

cell, x = nn.Dense(3, 3), ms.Tensor(np.ones((2, 3), np.float32))

def through_a_trace(x):
    return cell(x)

compiled = ms.jit(through_a_trace, capture_mode="trace")
compiled(x)
with th.record(cell) as rec:
    compiled(x)
print(rec.order(), rec.told)
"""


def test_what_was_compiled_from_a_trace_is_told(tmp_path: Path) -> None:
    """In a process of its own: MindSpore traces only where every frame has its source, and under pytest not all have."""
    script = tmp_path / "traced.py"
    script.write_text(TRACED)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    told = "through_a_trace is compiled by ms.jit from a trace: after its first run nothing in it is seen"
    assert run.stdout.splitlines()[-1] == f"[] {[told]}"


def test_what_mindspore_compiles_for_itself_stays_compiled(caplog: pytest.LogCaptureFixture) -> None:
    cell = net()
    optimizer = nn.Adam(cell.trainable_params(), 0.1)
    with th.record(cell), caplog.at_level(logging.WARNING, "tenterhook"):
        optimizer(ms.grad(lambda x: cell(x).sum(), None, optimizer.parameters)(ones(2, 3)))
    assert not [record for record in caplog.records if record.name == "tenterhook"]


# ---- values ----


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "int8", "int64", "uint16", "bool_", "complex64"]
)
def test_values_of_every_dtype(dtype: str) -> None:
    cell = nn.Identity()
    value = ms.Tensor(np.array([0, 1, 3]), ms.float32).astype(getattr(ms, dtype))
    with th.record(cell, tensors=True) as rec:
        cell(value)
    kept = rec[""].output
    assert kept.dtype == value.dtype
    np.testing.assert_array_equal(kept.asnumpy(), value.asnumpy())
    row = rec.query("select dtype, zero_count, note from values where kind = 'output'").to_pylist()[0]
    assert (row["dtype"], row["zero_count"], row["note"]) == (dtype.rstrip("_"), 1, None)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_values_without_dimensions_or_elements(shape: tuple[int, ...]) -> None:
    cell = nn.Identity()
    with th.record(cell, tensors=True) as rec:
        cell(ms.Tensor(np.ones(shape, np.float32)))
    row = rec.query("select shape, numel, note from values where kind = 'output'").to_pylist()[0]
    assert (row["shape"], row["numel"], row["note"]) == (list(shape), np.prod(shape), None)


def test_a_transposed_value_is_measured_in_its_own_order() -> None:
    cell, value = nn.Identity(), np.arange(6, dtype=np.float32).reshape(2, 3)
    with th.record(cell) as rec:
        cell(ms.Tensor(value).transpose(1, 0))
        cell(ms.Tensor(value.T.copy()))
    digests = rec.query("select distinct digest from values where kind = 'output'").to_pylist()
    assert len(digests) == 1


def test_a_kept_value_is_a_copy() -> None:
    cell, x = nn.Identity(), tensor(1.0, 2.0)
    with th.record(cell, tensors=True) as rec:
        cell(x)
    x.copy_(tensor(8.0, 9.0))
    assert rec[""].output.asnumpy().tolist() == [1.0, 2.0]


def test_the_running_sum_of_gradients_does_not_exist_and_that_is_said() -> None:
    cell = net()
    with th.hooks(cell) as hooks:
        handle = hooks.param_grad("0.weight", lambda name, gradient: None, accumulated=True)
        ms.grad(lambda x: cell(x).sum(), None, cell.trainable_params())(ones(1, 3))
        assert handle.fired == 0
        assert "no running sum" in hooks.why_not_fired(handle.sites[0])
