"""What the contract needs from a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Adapter", "Run"]


@dataclass
class Run:
    """What a forward and a backward pass gave."""

    loss: float
    parameters: dict[str, np.ndarray]  # gradients by the parameter's name
    inputs: list[np.ndarray]  # gradients of the inputs, where they were asked for


class Adapter(ABC):
    """Builds nets from NumPy weights, and runs them, in one framework."""

    name: str
    dtype: str = "float32"  # of its tensors

    # --- building ---
    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any: ...

    @abstractmethod
    def array(self, tensor: Any) -> np.ndarray: ...

    @abstractmethod
    def overwrite(self, tensor: Any, value: float) -> None:
        """Write into a tensor's memory, past differentiation, as much NumPy code does."""

    def parameter_array(self, name: str, tensor: Any) -> np.ndarray:
        """Return what belongs to a parameter, in the layout of this contract: weights as (outputs, inputs)."""
        return self.array(tensor)

    @abstractmethod
    def linear(self, weight: np.ndarray, bias: np.ndarray | None = None) -> Any:
        """Return a layer ``y = x @ weight.T + bias``."""

    @abstractmethod
    def relu(self) -> Any: ...

    @abstractmethod
    def identity(self) -> Any: ...

    @abstractmethod
    def sequential(self, *modules: Any) -> Any: ...

    @abstractmethod
    def module(self, name: str, forward: Callable[..., Any], **children: Any) -> Any:
        """Return a module of a new class with this forward function (``forward(self, ...)``) and these children."""

    @abstractmethod
    def checkpointed(self, module: Any) -> Any:
        """Return ``module``, run without keeping its activations: its forward runs again in the backward pass."""

    # --- running ---
    @abstractmethod
    def run(
        self, model: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray], *, wrt_inputs: bool = False
    ) -> Run:
        """Run ``loss(*tensors)``, a scalar, and its backward pass with respect to the parameters, or to the inputs too."""

    @abstractmethod
    def optimizer(self, model: Any, rate: float) -> Any: ...

    @abstractmethod
    def train(self, model: Any, optimizer: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray]) -> float:
        """Run one whole step: forward, backward, optimizer."""

    @abstractmethod
    def without_gradients(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn`` where no gradients are tracked."""

    @abstractmethod
    def parameters(self, model: Any) -> dict[str, np.ndarray]:
        """Return copies of the parameters by name."""
