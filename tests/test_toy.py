"""The toy framework differentiates rightly, and tenterhook works on it without any other."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

import tenterhook as th
from tenterhook.backends import toy


def test_gradients_equal_finite_differences() -> None:
    net = toy.Sequential(toy.Linear(3, 4, seed=1), toy.ReLU(), toy.Linear(4, 2, seed=2))
    x = toy.Tensor(np.random.default_rng(0).normal(size=(5, 3)), requires_grad=True)
    (net(x) * net(x)).sum().backward()
    for tensor in (x, *net.parameters()):
        assert tensor.grad is not None
        for index in np.ndindex(tensor.shape):
            values = []
            for change in (1e-6, -1e-6):
                before = tensor.data.copy()
                tensor.data = before.copy()
                tensor.data[index] += change
                values.append(float((net(x) * net(x)).sum().data))
                tensor.data = before
            assert np.isclose((values[0] - values[1]) / 2e-6, tensor.grad[index], rtol=1e-4, atol=1e-6)


def test_a_recording_of_a_toy_model() -> None:
    net = toy.Sequential(toy.Linear(3, 4), toy.ReLU(), toy.Linear(4, 2))
    optimizer = toy.SGD(net.parameters(), lr=0.1)
    with th.record(
        net, tensors=True, kinds=["input", "output", "grad_output", "grad_input", "param_grad", "update"]
    ) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            net(toy.Tensor(np.ones((2, 3)))).sum().backward()
            optimizer.step()
    order = [(call.step, call.phase, call.path) for call in rec.order()]
    assert order[:8] == [
        (0, "forward", ""), (0, "forward", "0"), (0, "forward", "1"), (0, "forward", "2"),
        (0, "backward", ""), (0, "backward", "2"), (0, "backward", "1"), (0, "backward", "0"),
    ]  # fmt: skip
    assert rec.recording.steps == [0, 1]
    output = rec["1"].calls[0].output
    assert np.array_equal(output.data, rec["2"].calls[0].input["x"].data)
    assert np.array_equal(rec[""].calls[0].grad_output.data, np.ones((2, 2)))
    assert not net.hooks


def test_no_framework_is_needed() -> None:
    program = (
        "import sys, tenterhook as th\n"
        "from tenterhook.backends import toy\n"
        "net = toy.Sequential(toy.Linear(2, 2), toy.ReLU())\n"
        "with th.record(net) as rec: net(toy.Tensor([[1., 2.]])).sum().backward()\n"
        "print(len(rec.order()), sorted({'torch', 'mindspore'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["6", "[]\n"]
