from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tenterhook.backends import toy
from tests.contract.adapters.base import Adapter, Run


class _Linear(toy.Linear):
    def __init__(self, weight: np.ndarray, bias: np.ndarray | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight.data = np.asarray(weight.T, np.float64)
        if bias is None:
            del self.bias
        else:
            self.bias.data = np.asarray(bias, np.float64)

    def forward(self, x: toy.Tensor) -> toy.Tensor:
        return x @ self.weight + self.bias if hasattr(self, "bias") else x @ self.weight


class _Identity(toy.Module):
    def forward(self, x: Any) -> Any:
        return x


class ToyAdapter(Adapter):
    name = "toy"
    dtype = "float64"

    def tensor(self, array: np.ndarray) -> toy.Tensor:
        return toy.Tensor(array)

    def array(self, tensor: Any) -> np.ndarray:
        return np.array(tensor.data if isinstance(tensor, toy.Tensor) else tensor)

    def overwrite(self, tensor: toy.Tensor, value: float) -> None:
        tensor.data[...] = value

    def parameter_array(self, name: str, tensor: Any) -> np.ndarray:
        return self.array(tensor).T if name.endswith("weight") else self.array(tensor)

    def linear(self, weight: np.ndarray, bias: np.ndarray | None = None) -> toy.Module:
        return _Linear(weight, bias)

    def relu(self) -> toy.Module:
        return toy.ReLU()

    def identity(self) -> toy.Module:
        return _Identity()

    def sequential(self, *modules: Any) -> toy.Module:
        return toy.Sequential(*modules)

    def module(self, name: str, forward: Callable[..., Any], **children: Any) -> toy.Module:
        made = type(name, (toy.Module,), {"forward": forward})()
        for child, module in children.items():
            setattr(made, child, module)
        return made

    def checkpointed(self, module: Any) -> toy.Module:
        return toy.Checkpointed(module)

    def run(
        self, model: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray], *, wrt_inputs: bool = False
    ) -> Run:
        tensors = [toy.Tensor(array, requires_grad=wrt_inputs) for array in inputs]
        parameters = self._named(model)
        for parameter in parameters.values():
            parameter.grad = None
        value = loss(*tensors)
        value.backward()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        return Run(
            float(value.data),
            {name: self.parameter_array(name, gradient) for name, gradient in gradients.items()},
            [np.array(tensor.grad) for tensor in tensors if tensor.grad is not None],
        )

    def _named(self, model: Any) -> dict[str, toy.Parameter]:
        return {entry.name: entry.parameter for entry in toy.BACKEND.parameters(model)}

    def optimizer(self, model: Any, rate: float) -> Any:
        return toy.SGD(model.parameters(), rate)

    def train(self, model: Any, optimizer: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray]) -> float:
        done = self.run(model, loss, inputs)
        optimizer.step()
        return done.loss

    def without_gradients(self, fn: Callable[[], Any]) -> Any:
        with toy.no_grad():
            return fn()

    def parameters(self, model: Any) -> dict[str, np.ndarray]:
        return {name: parameter.data.copy() for name, parameter in self._named(model).items()}


ADAPTER = ToyAdapter()
