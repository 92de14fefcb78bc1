"""The nets of the contract, and what they compute, worked out by hand in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.contract.adapters.base import Adapter

__all__ = ["B0", "B2", "W0", "W2", "Expected", "X", "close", "loss_of", "mlp", "mlp_expected", "net_with"]

_random = np.random.default_rng(7)


def _array(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


X, W0, B0, W2, B2 = _array(2, 3), _array(4, 3), _array(4), _array(2, 4), _array(2)


def mlp(fw: Adapter) -> Any:
    """``0`` linear, ``1`` relu, ``2`` a container whose output is that of its only child ``2.0``, a linear layer."""
    return fw.sequential(fw.linear(W0, B0), fw.relu(), fw.sequential(fw.linear(W2, B2)))


@dataclass
class Expected:
    """Outputs and gradients of the sum of squares of what :func:`mlp` gives for ``X``."""

    outputs: dict[str, np.ndarray]
    grad_outputs: dict[str, np.ndarray]
    grad_inputs: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    loss: float


def mlp_expected() -> Expected:
    first = X @ W0.T + B0
    hidden = np.maximum(first, 0)
    out = hidden @ W2.T + B2
    of_out = 2 * out
    of_hidden = of_out @ W2
    of_first = of_hidden * (first > 0)
    return Expected(
        {"0": first, "1": hidden, "2.0": out, "2": out, "": out},
        {"0": of_first, "1": of_hidden, "2.0": of_out, "2": of_out, "": of_out},
        {"0": of_first @ W0, "1": of_first, "2.0": of_hidden, "2": of_hidden, "": of_first @ W0},
        {
            "0.weight": of_first.T @ X,
            "0.bias": of_first.sum(0),
            "2.0.weight": of_out.T @ hidden,
            "2.0.bias": of_out.sum(0),
        },
        float((out**2).sum()),
    )


def loss_of(net: Any, of: Any = lambda y: y * y) -> Any:
    """Return the loss function ``of(net(x)).sum()``."""
    return lambda x: of(net(x)).sum()


def close(actual: Any, expected: Any) -> None:
    """Require equality up to rounding."""
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def net_with(fw: Adapter, between: Callable[[Any], Any] = lambda v: v) -> Any:
    """Linear, an edit in the model's own code, relu, linear."""
    return fw.module(
        "Net",
        lambda self, x: self.b(self.act(between(self.a(x)))),
        a=fw.linear(W0, B0), act=fw.relu(), b=fw.linear(W2, B2),
    )  # fmt: skip
