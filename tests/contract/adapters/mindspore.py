from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from tests.contract.adapters.base import Adapter, Run


class MindSporeAdapter(Adapter):
    name = "mindspore"

    def __init__(self) -> None:
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)

    def tensor(self, array: np.ndarray) -> ms.Tensor:
        return ms.Tensor(array)

    def array(self, tensor: ms.Tensor) -> np.ndarray:
        return tensor.asnumpy().copy()

    def overwrite(self, tensor: ms.Tensor, value: float) -> None:
        tensor.asnumpy()[...] = value

    def linear(self, weight: np.ndarray, bias: np.ndarray | None = None) -> nn.Cell:
        layer = nn.Dense(weight.shape[1], weight.shape[0], has_bias=bias is not None)
        layer.weight.set_data(ms.Tensor(weight))
        if bias is not None:
            layer.bias.set_data(ms.Tensor(bias))
        return layer

    def relu(self) -> nn.Cell:
        return nn.ReLU()

    def identity(self) -> nn.Cell:
        return nn.Identity()

    def sequential(self, *modules: Any) -> nn.Cell:
        return nn.SequentialCell(*modules)

    def module(self, name: str, forward: Callable[..., Any], **children: Any) -> nn.Cell:
        made = type(name, (nn.Cell,), {"construct": forward})()
        for child, module in children.items():
            setattr(made, child, module)
        return made

    def checkpointed(self, module: Any) -> nn.Cell:
        module.recompute()
        return self.module("Checkpointed", lambda self, x: self.inner(x), inner=module)

    def run(
        self, model: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray], *, wrt_inputs: bool = False
    ) -> Run:
        weights = model.trainable_params()
        positions = tuple(range(len(inputs))) if wrt_inputs else None
        if not weights:
            value, gradients = ms.value_and_grad(loss, positions or 0)(*map(ms.Tensor, inputs))
            of_inputs, of_weights = gradients, ()
        else:
            value, gradients = ms.value_and_grad(loss, positions, weights)(*map(ms.Tensor, inputs))
            of_inputs, of_weights = gradients if wrt_inputs else ((), gradients)
        if wrt_inputs and not isinstance(of_inputs, tuple):  # a single one comes without its tuple
            of_inputs = (of_inputs,)
        names = {id(parameter): name for name, parameter in model.parameters_and_names()}
        return Run(
            float(value.asnumpy()),
            {names[id(weight)]: self.array(g) for weight, g in zip(weights, of_weights, strict=True)},
            [self.array(g) for g in of_inputs] if wrt_inputs else [],
        )

    def optimizer(self, model: Any, rate: float) -> Any:
        return nn.SGD(model.trainable_params(), rate)

    def train(self, model: Any, optimizer: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray]) -> float:
        value, gradients = ms.value_and_grad(loss, None, optimizer.parameters)(*map(ms.Tensor, inputs))
        optimizer(gradients)
        return float(value.asnumpy())

    def without_gradients(self, fn: Callable[[], Any]) -> Any:
        return fn()  # outside of value_and_grad none are

    def parameters(self, model: Any) -> dict[str, np.ndarray]:
        return {name: self.array(p) for name, p in model.parameters_and_names()}


ADAPTER = MindSporeAdapter()
