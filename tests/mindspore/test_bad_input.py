"""What goes wrong in MindSpore by itself, with and without a word: it is told, and recordings show what was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn, ops

import tenterhook as th
from tenterhook.errors import EditError, HookError, SelectionError, UnsupportedError
from tests.mindspore.cells import Square, net, ones, tensor

# ---- operations in place that do nothing ----


class Doubles(nn.Cell):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        y = x * 1
        y.mul_(2.0)
        return y + 1


def told(rec: th.Recorder, word: str) -> list[str]:
    return [sentence for sentence in rec.told if word in sentence]


def test_a_cell_that_computes_in_place_in_vain_is_told_and_recorded_as_it_is() -> None:
    cell = Doubles()
    with th.record(cell, tensors=True) as rec:
        given = cell(tensor(3.0))
    assert given.asnumpy().item() == rec[""].output.asnumpy().item() == 4.0
    (sentence,) = told(rec, "Doubles.construct")
    assert "mul_, which changes nothing on CPU" in sentence


def test_what_works_in_place_is_not_told() -> None:
    class Copies(nn.Cell):
        def construct(self, x: ms.Tensor) -> ms.Tensor:
            y = x * 1
            y.copy_(x * 5)
            return y

    cell = Copies()
    with th.record(cell, tensors=True) as rec:
        cell(tensor(3.0))
    assert rec[""].output.asnumpy().item() == 15.0
    assert told(rec, "in place") == told(rec, "changes nothing") == []


def test_a_hook_that_computes_in_place_in_vain_is_told(caplog: pytest.LogCaptureFixture) -> None:
    cell = Square()

    def halve(module: nn.Cell, args: Any, output: ms.Tensor) -> None:
        output.div_(2.0)

    with th.hooks(cell) as hooks:
        hooks.forward("", halve)
        assert cell(tensor(3.0)).asnumpy().item() == 9.0
    assert any("halve uses div_, which changes nothing on CPU" in record.message for record in caplog.records)


def test_an_optimizer_that_leaves_the_parameters_alone_is_told() -> None:
    cell = net()
    before = cell[0].weight.asnumpy().copy()
    for make, word in ((mint.optim.SGD, "mint.optim.SGD has left the parameters"), (nn.SGD, "")):
        optimizer = make(cell.trainable_params(), 0.1) if make is nn.SGD else make(cell.trainable_params(), lr=0.1)
        with th.record(cell) as rec:
            _, gradients = ms.value_and_grad(lambda x: cell(x).sum(), None, cell.trainable_params())(ones(2, 3))
            optimizer(gradients)
        assert len(told(rec, "has left the parameters")) == bool(word)
        assert np.array_equal(before, cell[0].weight.asnumpy()) == bool(word)


# ---- kernels that are missing ----


class NoKernel(nn.Cell):
    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return mint.norm(x)


def test_a_kernel_that_is_missing_is_an_error_of_its_cell_and_leaves_no_harm() -> None:
    cell = nn.SequentialCell(Square(), NoKernel())
    with pytest.raises(RuntimeError, match="unregistered") as bare:
        cell(ones(2))
    with th.record(cell, kinds=["output", "grad_output"]) as rec:
        with pytest.raises(RuntimeError, match="unregistered") as raised:
            ms.grad(cell)(ones(2))
        assert type(raised.value) is type(bare.value)
        assert "1 (NoKernel)" in "\n".join(getattr(raised.value, "__notes__", [str(raised.value)]))
        assert ms.grad(lambda x: cell[0](x).sum())(tensor(3.0)).asnumpy().item() == 6.0
    errors = {call.path: bool(call.error) for call in rec.order() if call.phase == "forward"}
    assert errors == {"": True, "0": False, "1": True}
    assert th.installed_hooks(cell) == []


# ---- graph mode and compiled code ----


@pytest.mark.parametrize("session", [th.hooks, th.record, th.edit])
def test_graph_mode_is_refused_by_every_session(session: Any) -> None:
    cell = net()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(UnsupportedError, match="graph mode"):
            session(cell)
        with pytest.raises(UnsupportedError, match="graph mode"):
            th.register_forward_hook(cell, lambda module, args, output: None)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert th.installed_hooks(cell) == []


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda fn, x: ms.vmap(fn)(x),
    "jvp": lambda fn, x: ms.jvp(fn, x, x)[0],
    "jacrev": lambda fn, x: ms.jacrev(fn)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_that_compile_are_told(transform: str) -> None:
    cell, x = net(), ones(2, 3)

    def users(x: ms.Tensor) -> ms.Tensor:
        return cell(x)

    bare = TRANSFORMS[transform](users, x).asnumpy()
    with th.record(cell) as rec:
        came = TRANSFORMS[transform](users, x).asnumpy()
        ms.grad(lambda x: cell(x).sum())(x)
    np.testing.assert_array_equal(came, bare)
    assert [sentence.split(": ")[0].rpartition(".")[2] for sentence in told(rec, f"{transform} compiles")] == ["users"]
    assert [call.path for call in rec.order() if call.phase == "forward"] == ["", "0", "1", "2", "2.0"]


# ---- callbacks ----


def test_hooking_by_the_name_of_a_parameter_and_a_container_that_is_never_called() -> None:
    class Holds(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.CellList([nn.Dense(3, 3)])

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.items[0](x)

    cell = Holds()
    with th.hooks(cell) as hooks:
        with pytest.raises(SelectionError, match="parameter"):
            hooks.forward("items.0.weight", lambda module, args, output: None)
        with pytest.raises(SelectionError, match="items"):
            hooks.forward("items", lambda module, args, output: None)


@pytest.mark.parametrize("returned", [3.0, [1, 2], np.ones((2, 2), np.float32), "text"])
def test_what_is_no_output_is_refused(returned: Any) -> None:
    """MindSpore takes a NumPy array, and every gradient is zero from then on."""
    cell = net()
    with th.hooks(cell) as hooks:
        hooks.forward("0", lambda module, args, output: returned)
        with pytest.raises(EditError, match="structure"):
            cell(ones(2, 3))


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_gradient_of_another_shape_or_dtype_is_refused(change: str) -> None:
    """MindSpore checks neither: a scalar is broadcast, and float16 rounds all gradients from there on."""
    cell = net()
    with th.hooks(cell) as hooks:
        hooks.backward_pre("0", lambda module, out: (out[0].sum() if change == "shape" else out[0].astype(ms.float16),))
        with pytest.raises(EditError, match=change):
            ms.grad(lambda x: cell(x).sum(), 0, cell.trainable_params())(ones(2, 3))


def test_callbacks_that_call_their_own_cell_or_draw_random_numbers() -> None:
    cell, seen = net(), []
    with th.hooks(cell) as hooks:
        hooks.forward("0", lambda module, args, output: seen.append(module(*args).shape) and None)
        hooks.forward("1", lambda module, args, output: np.random.default_rng(0).random() and None)
        cell(ones(2, 3))
    assert seen == [(2, 4)]


def test_a_callback_that_takes_other_arguments_is_refused_at_once() -> None:
    with th.hooks(net()) as hooks:
        with pytest.raises(HookError, match="grad_input"):
            hooks.backward("0", lambda module: None)
        with pytest.raises(HookError, match="needs a function"):
            hooks.forward("0", 3)


def test_a_callback_that_removes_another_that_has_yet_to_run() -> None:
    cell, seen = net(), []
    with th.hooks(cell) as hooks:
        hooks.backward_pre("2", lambda module, out: later.remove())
        later = hooks.backward_pre("0", lambda module, out: seen.append(1))
        ms.grad(lambda x: cell(x).sum(), None, cell.trainable_params())(ones(2, 3))
    assert seen == []


NUMPY_2 = """
import types, warnings
import tenterhook.backends._mindspore_numpy as word
word.numpy = types.SimpleNamespace(__version__="2.4.6")
from mindspore import nn
import tenterhook as th
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        with th.hooks(nn.Dense(2, 2)), th.record(nn.Dense(2, 2)):
            pass
print(sum("numpy 2.4.6 is installed" in str(one.message) for one in said))
"""


def test_numpy_2_is_told_once_by_whatever_session_comes_first(tmp_path: Path) -> None:
    script = tmp_path / "numpy2.py"
    script.write_text(NUMPY_2)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "1"


def test_a_network_that_is_not_finite_is_recorded() -> None:
    cell = nn.SequentialCell(Square())
    with th.record(cell) as rec:
        ms.grad(lambda x: ops.log(cell(x) - cell(x)).sum())(tensor(3.0))
    rows = rec.query("select nan_count + posinf_count + neginf_count as odd from values where kind = 'grad_output'")
    assert sum(row["odd"] for row in rows.to_pylist()) > 0
