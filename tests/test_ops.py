"""`th.record(model, ops=True)`: functional calls between modules."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import tenterhook as th
from tenterhook.address import parse_address
from tenterhook.errors import TenterhookError
from tests.ops_net import Net, ops


def forward_places(recording: Any) -> list[str]:
    return [call.path or "(root)" for call in recording.order() if call.phase == "forward"]


def test_ops_and_modules_stand_in_the_order_in_which_they_ran() -> None:
    """Row 06, same kind: functions and methods between modules that are themselves nested."""
    model = Net()
    with th.record(model, ops=True) as rec:
        model(torch.randn(2, 4))
    assert forward_places(rec) == [
        "(root)", "a", "(root)/relu", "(root)/tanh", "inner", "inner.body", "inner.body.0", "inner.body.1",
        "inner/cat", "inner/flatten", "inner/add", "(root)/matmul", "(root)/softmax",
    ]  # fmt: skip


def test_attributes_are_no_ops_and_the_frameworks_own_calls_are_shown_on_request() -> None:
    """Row 06: ``F.relu``, ``@`` and a module made inside ``forward``; modules are ``['', 'a']`` still."""

    class Row06(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.Tanh()(F.relu(self.a(x)))
            return torch.softmax(x @ x.T, -1)

    names = []
    for how in (True, "all"):
        model = Row06()
        with th.record(model, ops=how) as rec:
            model(torch.ones(2, 3))
        names.append([call.path.rpartition("/")[2] for call in rec.order() if call.type == "op"])
        assert [call.path for call in rec.order() if call.type != "op"] == ["", "a"]
    assert names == [["relu", "tanh", "matmul", "softmax"], ["linear", "relu", "tanh", "matmul", "softmax"]]


def test_values_and_gradients_of_an_op() -> None:
    """Row 06, same kind: what they gave, and the gradients of it."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 4)
    expected = model.a(x).relu()
    with th.record(model, ops=True, tensors=True) as rec:
        model(x).square().sum().backward()
    assert torch.equal(rec["(root)/relu"].output, expected)
    assert torch.equal(rec["(root)/softmax"].grad_output, rec[""].grad_output)
    assert torch.equal(rec["Net/inner/cat"].output[0], rec["inner.body"].output[0])
    backward = [call.path for call in rec.order() if call.phase == "backward"]
    assert backward[:4] == ["", "(root)/softmax", "(root)/matmul", "inner"]


def test_calls_are_numbered_within_module_and_step() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(F.relu(x) - 1)

    model = nn.Sequential(Twice(), Twice())
    with th.record(model, ops=True) as rec:
        for _ in range(2):
            model(torch.ones(2))
    assert [(call.path, call.call, call.step) for call in rec.order() if call.path.endswith("relu")] == [
        (path, call, step) for step in (0, 1) for path in ("0/relu", "1/relu") for call in (0, 1)
    ]


def test_the_line_is_the_users() -> None:
    model = Net()
    with th.record(model, ops=True) as rec:
        model(torch.ones(2, 4))
    lines, start = inspect.getsourcelines(Net.forward)
    for op, text in (("relu", "F.relu"), ("tanh", "nn.Tanh()"), ("softmax", "torch.softmax")):
        (line,) = (start + number for number, line in enumerate(lines) if text in line)
        assert rec[f"(root)/{op}"].calls[0].source == f"{inspect.getsourcefile(Net)}:{line}"
    assert rec["a"].calls[0].source is None


def test_addresses_read_back() -> None:
    model = Net()
    with th.record(model, ops=True) as rec:
        model(torch.ones(2, 4))
    for path, place in (("inner/cat", "inner/cat"), ("(root)/relu", "(root)/relu")):
        (value,) = rec[path].calls[0].values
        assert value.address == f"{place}:output#0@0"
        assert str(parse_address(value.address)) == value.address
    assert "(root)/relu" in rec.recording


def test_a_recording_on_disk_holds_the_same(tmp_path: Any) -> None:
    model = Net()
    with th.record(model, ops=True, to=tmp_path / "a.thk") as rec:
        model(torch.ones(2, 4))
    opened = th.open(tmp_path / "a.thk")
    assert forward_places(opened) == forward_places(rec)
    assert opened["(root)/relu"].calls[0].source is not None


def test_only_ops_of_selected_modules_are_recorded_under_the_module_that_makes_them() -> None:
    model = Net()
    with th.record(model, "inner", ops=True) as rec:
        model(torch.ones(2, 4))
    assert forward_places(rec) == ["inner", "inner/cat", "inner/flatten", "inner/add"]
    with th.record(model, ["", "inner.body"], ops=True) as rec:
        model(torch.ones(2, 4))
    assert ops(rec) == ["(root)/relu#0", "(root)/tanh#0", "(root)/matmul#0", "(root)/softmax#0"]


def test_what_gives_no_tensor_is_no_op_and_writing_into_one_is() -> None:
    class Queries(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.size(0) == x.shape[0] == len(x)
            assert x.sum().item() == 2
            y = x.clone()
            y[0] = 5
            y += 1
            return y

    model = Queries()
    with th.record(model, ops=True, tensors=True) as rec:
        model(torch.ones(2))
    assert ops(rec) == [f"(root)/{name}#0" for name in ("sum", "clone", "setitem", "add_")]
    assert rec["(root)/setitem"].output.tolist() == [5, 1]


def test_views_transforms_and_own_functions_of_autograd() -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * ctx.saved_tensors[0].exp()

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            y[..., :2].mul_(2)
            y.t().add_(1)
            y = y + torch.func.grad(lambda t: t.pow(3).sum())(x) + torch.func.vmap(torch.sin)(x)
            sparse = torch.sparse.mm(x.detach().to_sparse(), x.t())
            return Exp.apply(y).sum() + sparse.sum() + torch.linalg.svd(x)[1].sum()

    results = []
    for recorded in (False, True):
        model, x = Odd(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if recorded:
            with th.record(model, ops=True, on_error="raise") as rec:
                (out := model(x)).backward()
            names = {place.partition("#")[0].rpartition("/")[2] for place in ops(rec)}
            assert {"mul", "mul_", "t", "add_", "pow", "sin", "sparse_mm", "exp", "linalg_svd"} <= names
            assert not [name for name in names if name.startswith("_")]
        else:
            (out := model(x)).backward()
        results.append((out.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] is not None
    assert results[1][1] is not None
    assert torch.equal(results[0][1], results[1][1])


def test_nothing_outside_the_model_or_of_callbacks_is_recorded() -> None:
    model = Net()
    with th.record(model, ops=True) as rec, th.hooks(model) as hooks:
        hooks.forward("**", lambda module, args, output: (torch.exp(output), None)[1])
        hooks.forward_pre("**", lambda module, args: (args[0].cos(), None)[1])
        y = model(torch.ones(2, 4)).sin()
        y.sum().backward()
    assert not [place for place in forward_places(rec) if place.rpartition("/")[2] in ("exp", "cos", "sin", "sum")]


def test_no_mode_is_left_after_any_end() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor, error: BaseException) -> torch.Tensor:
            x = x.cos()
            raise error

    for error in (ValueError("mine"), KeyboardInterrupt()):
        failing = Failing()
        with pytest.raises(type(error)), th.record(failing, ops=True):
            failing(torch.ones(1), error)
        assert torch._C._len_torch_function_stack() == 0
    model = Net()
    with th.record(model, ops=True) as rec:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 7))
        assert torch._C._len_torch_function_stack() == 0
        model(torch.ones(2, 4))
    assert "(root)/softmax#0" in ops(rec)


def test_an_op_that_raises_has_its_error() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.ones(1, 1)])

    model = Failing()
    with pytest.raises(RuntimeError), th.record(model, ops=True) as rec:
        model(torch.ones(2))
    (call,) = rec["(root)/cat"].calls
    assert call.error is not None
    assert call.error.startswith("RuntimeError")


def test_modes_of_the_user_see_what_they_saw_and_stay() -> None:
    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **kwargs or {})

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mode = Counting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.mode:
                return x.cos().sin()

    plain, outer, model = Inside(), Counting(), Inside()
    plain(torch.ones(1))
    with th.record(model, ops=True) as rec, outer:
        model(torch.ones(1))
    assert [name for name in model.mode.names if name in ("cos", "sin")] == ["cos", "sin"]
    assert [name for name in outer.names if name in ("cos", "sin")] == ["cos", "sin"]
    assert ops(rec) == ["(root)/cos#0", "(root)/sin#0"]


def test_a_mode_entered_in_the_model_and_left_outside_survives() -> None:
    class Plain(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    mode = Plain()

    class Entering(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mode.__enter__()
            return x.cos()

    model = Entering()
    with th.record(model, ops=True) as rec:
        model(torch.ones(1))
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._get_function_stack_at(0) is mode
    mode.__exit__(None, None, None)
    assert ops(rec) == ["(root)/cos#0"]


def test_threads_have_numbers_of_their_own() -> None:
    model = Net()
    with th.record(model, ops=True) as rec:
        rec.step()  # all in one step
        threads = [threading.Thread(target=lambda: [model(torch.ones(2, 4)) for _ in range(3)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    by_thread: dict[Any, list[Any]] = {}
    for call in rec["(root)/relu"].calls:
        by_thread.setdefault(call.thread, []).append(call.call)
    assert sorted(by_thread.values()) == [[0, 1, 2], [0, 1, 2]]


def test_fused_paths_cannot_be_kept_beside_ops() -> None:
    with pytest.raises(TenterhookError, match="fused"):
        th.record(Net(), ops=True, fused="keep")


def test_ops_must_be_known() -> None:
    with pytest.raises(TenterhookError, match="ops='some'"):
        th.record(Net(), ops="some")  # type: ignore[arg-type]
