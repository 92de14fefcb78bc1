from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.contract.adapters.base import Adapter, Run


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class TorchAdapter(Adapter):
    name = "torch"

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().numpy().copy()

    def overwrite(self, tensor: torch.Tensor, value: float) -> None:
        tensor.detach().numpy()[...] = value

    def linear(self, weight: np.ndarray, bias: np.ndarray | None = None) -> nn.Module:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.weight.data = torch.tensor(weight)
        if bias is not None:
            layer.bias.data = torch.tensor(bias)
        return layer

    def relu(self) -> nn.Module:
        return nn.ReLU()

    def identity(self) -> nn.Module:
        return nn.Identity()

    def sequential(self, *modules: Any) -> nn.Module:
        return nn.Sequential(*modules)

    def module(self, name: str, forward: Callable[..., Any], **children: Any) -> nn.Module:
        made = type(name, (nn.Module,), {"forward": forward})()
        for child, module in children.items():
            setattr(made, child, module)
        return made

    def checkpointed(self, module: Any) -> nn.Module:
        return _Checkpointed(module)

    def run(
        self, model: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray], *, wrt_inputs: bool = False
    ) -> Run:
        tensors = [torch.tensor(array, requires_grad=wrt_inputs) for array in inputs]
        model.zero_grad()
        value = loss(*tensors)
        value.backward()
        gradients = {name: self.array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        return Run(value.item(), gradients, [self.array(t.grad) for t in tensors if t.grad is not None])

    def optimizer(self, model: Any, rate: float) -> Any:
        return torch.optim.SGD(model.parameters(), lr=rate)

    def train(self, model: Any, optimizer: Any, loss: Callable[..., Any], inputs: Sequence[np.ndarray]) -> float:
        done = self.run(model, loss, inputs)
        optimizer.step()
        return done.loss

    def without_gradients(self, fn: Callable[[], Any]) -> Any:
        with torch.no_grad():
            return fn()

    def parameters(self, model: Any) -> dict[str, np.ndarray]:
        return {name: self.array(p) for name, p in model.named_parameters()}


ADAPTER = TorchAdapter()
