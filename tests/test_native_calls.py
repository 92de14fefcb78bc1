"""The native path writes the rows that the Python code writes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import tenterhook as th
from benchmarks.models import build as build_benchmark
from tenterhook.backends.torch import TorchBackend
from tenterhook.stats import THREADED_NUMEL
from tenterhook.tracker import Tracker
from tests.five_models import MODELS, train
from tests.native_rows import NATIVE_ONLY, _both, _Function, _Gives, _net
from tests.properties.test_nothing_changed import EXAMPLES
from tests.properties.trees import WIDTH, Boom, Spec, build, specs, unwrap

pytestmark = NATIVE_ONLY

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "order and shapes": {"stats": None, "kinds": ["output"]},
    "inputs, tensors": {"tensors": True},
    "input gradients": {"kinds": ["grad_input", "grad_output", "output"]},
    "every second step": {"every": 2},
    "no sketch": {"sketch": False},
    "recomputations": {"recompute": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_five_models_give_the_same_rows(name: str, options: str) -> None:
    make, shape = MODELS[name]
    native, python, count = _both(make, lambda net: train(net, shape), **OPTIONS[options])
    assert native == python
    assert count > 0 or "grad_input" in OPTIONS[options].get("kinds", ())


@pytest.mark.parametrize("name", ["tiny401", "transformer"])
def test_benchmark_models_give_the_same_rows(name: str) -> None:
    net, x = build_benchmark(name)

    def work(net: nn.Module) -> None:
        torch.manual_seed(3)
        net(x).square().mean().backward()
        with torch.no_grad():
            net(x)

    native, python, count = _both(lambda: copy.deepcopy(net), work)
    assert native == python
    assert count > len(native[0]) / 2  # the native path is what records


@EXAMPLES
@given(spec=specs())
def test_any_tree_gives_the_same_rows(spec: Spec) -> None:
    def work(net: nn.Module) -> None:
        for step in range(2):
            x = torch.randn(3, WIDTH, requires_grad=step == 0)
            try:
                out = unwrap(net(x, scale=torch.full((), 0.5)))
                if out.requires_grad:
                    out.square().sum().backward()
            except Boom:
                continue

    native, python, _ = _both(lambda: build(spec), work)
    assert native == python


def _zeros_without_memory() -> Tensor:
    return torch._efficientzerotensor((3, 4))  # pyright: ignore[reportPrivateImportUsage]


UNUSUAL: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda x: x.t() * 1,
    "not contiguous": lambda x: (x * 2)[:, ::2],
    "expanded": lambda x: (x * 2)[:1].expand(5, 4),
    "no dimensions": lambda x: x.sum(),
    "empty": lambda x: x[:0] * 1,
    "complex": lambda x: torch.complex(x, x).conj(),
    "negated view": lambda x: torch.complex(x, x).conj().imag,
    "bool": lambda x: x > 0,
    "long": lambda x: x.long(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "NaN and infinities": lambda x: x / 0,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x.detach(), x.detach()[:1]]),
    "quantised": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
    "parameter": lambda x: nn.Parameter(x.detach()),
    "the input itself": lambda x: x,
    "view": lambda x: x.view(-1),
    "None": lambda x: None,
    "tuple": lambda x: (x * 2, None, [x * 3]),
    "large": lambda x: x.repeat(500, 10),
    "large, transposed": lambda x: x.repeat(500, 10).t() + 0,
    "for several threads": lambda x: x.repeat(30000, 1),
    "for several threads, transposed": lambda x: x.repeat(30000, 1).t(),
    "many dimensions": lambda x: x.reshape(3, 4, *[1] * 20) * 2,
    "vmap": torch.func.vmap(torch.sin),
    "zeros without memory": lambda x: _zeros_without_memory(),
    "a part of zeros without memory": lambda x: _zeros_without_memory()[1:],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("name", UNUSUAL)
def test_outputs_of_any_kind_give_the_same_rows(name: str) -> None:
    def work(net: nn.Module) -> None:
        for x in (torch.arange(12.0).reshape(3, 4), torch.ones(3, 4, requires_grad=True)):
            net(x).sum().backward()

    native, python, _ = _both(lambda: _Gives(UNUSUAL[name]), work)
    assert native == python


class _Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = _Function(self._fail)
        self.error: BaseException | None = error

    def _fail(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("stop"), SystemExit(3)])
def test_what_raises_is_recorded_and_the_next_call_is_clean(error: BaseException) -> None:
    def work(net: nn.Module) -> None:
        assert isinstance(net, _Fails)
        with pytest.raises(type(error)) as raised:
            net(torch.ones(2))
        assert raised.value is error
        net.error = None
        net(torch.ones(2))

    native, python, _ = _both(lambda: _Fails(error), work)
    assert native == python


def test_an_error_that_is_caught_inside_leaves_the_order_right() -> None:
    class Catches(_Fails):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except ValueError:
                return x

    native, python, _ = _both(
        lambda: nn.Sequential(Catches(ValueError("mine")), nn.ReLU()), lambda net: net(torch.ones(2))
    )
    assert native == python


def test_functional_calls_are_the_models_not_those_of_another_recording() -> None:
    def rows(net: nn.Module, native: bool) -> list[dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
            with th.record(net, ops=True) as rec, th.record(net, kinds=["output"]):
                net(torch.ones(3, 4))
        return rec.table("calls").drop_columns(["start_ns", "duration_ns"]).to_pylist()

    for name in ("vmap", "sparse", "complex", "no dimensions"):
        net = _Gives(UNUSUAL[name])
        with th.record(net, ops=True) as rec:
            net(torch.ones(3, 4))
        alone = [call.path for call in rec.order()]
        native = rows(net, True)
        assert native == rows(net, False)
        assert sorted(row["path"] for row in native) == sorted(alone)


def test_pauses_and_sampled_steps() -> None:
    def work(net: nn.Module) -> None:
        for _ in range(7):
            with torch.no_grad():
                net(torch.ones(2, 4))

    native, python, count = _both(_net, work, every=3)
    assert native == python
    assert count > 0
    assert sorted({row["step"] for row in native[0]}) == [0, 3, 6]


def test_calls_that_begin_long_after_the_one_before_are_followed_natively_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenterhook.tracker._PAUSE_NS", -1)  # as if each module took its time
    begun: list[str] = []
    begin = Tracker.begin
    monkeypatch.setattr(Tracker, "begin", lambda self, watched: (begun.append(watched.path), begin(self, watched))[1])
    net, x = _net(), torch.ones(2, 4)
    with th.record(net) as rec:
        net(x)
        begun.clear()
        for _ in range(3):
            net(x).sum().backward()
    assert begun == ["", "", ""]
    assert len(rec.table("calls")) == (4 + 3) * 6


def test_large_tensors_are_recorded_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []
    measure = TorchBackend.measure

    def seen(self: TorchBackend, tensor: Tensor, *rest: Any) -> str | None:
        measured.append(tuple(tensor.shape))
        return measure(self, tensor, *rest)

    monkeypatch.setattr(TorchBackend, "measure", seen)
    net = nn.Sequential(nn.ReLU(), nn.Tanh())
    with th.record(net, "*") as rec:
        net(torch.ones(2, THREADED_NUMEL))  # here the kernel is told of torch's threads
        measured.clear()
        for _ in range(3):
            net(torch.ones(2, THREADED_NUMEL))
    assert measured == []
    assert rec.table("values")["numel"].to_pylist() == [2 * THREADED_NUMEL] * 8


def test_threads_write_their_own_rows() -> None:
    net = _net()
    with th.record(net) as rec:

        def work() -> None:
            for _ in range(20):
                net(torch.ones(2, 4)).sum().backward()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for one in threads:
            one.start()
        work()
        for one in threads:
            one.join()
    calls = rec.table("calls").to_pylist()
    forward = [row for row in calls if row["phase"] == "forward"]
    assert len(forward) == 4 * 20 * 6
    assert len({row["seq"] for row in calls}) == len(calls)
    assert rec.table("values").num_rows == 2 * 4 * 20 * 6
    for thread in {row["thread"] for row in calls}:
        last = [row["call"] for row in forward if row["thread"] == thread and row["path"] == "2"]
        assert len(last) == 20


def test_the_python_form_alone_gives_the_same_rows() -> None:
    program = (
        "import torch, tenterhook as th\n"
        "from tests.five_models import MODELS, train\n"
        "make, shape = MODELS['transformer']\n"
        "torch.manual_seed(0)\n"
        "net = make()\n"
        "with th.record(net) as rec: train(net, shape)\n"
        "calls = rec.table('calls').drop_columns(['start_ns', 'duration_ns'])\n"
        "print(hash(str((calls.to_pylist(), rec.table('values').to_pylist()))))\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TENTERHOOK_CALLS": form, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for form in ("native", "python")
    ]
    assert printed[0] == printed[1]
