"""Five networks that a recording must not change, and what a run of each leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Outcome", "differences", "train"]


class InPlaceCNN(nn.Module):
    """Convolutions with in-place ReLUs, batch norm, and functional ops between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(inplace=True),
        )
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.relu(self.features(x).mean((2, 3)))))


class Recurrent(nn.Module):
    """An LSTM, whose output is a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        return self.head(out[:, -1] + hidden[-1])


class Transformer(nn.Module):
    """An encoder with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Shared(nn.Module):
    """One module called twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.again = self.encode
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x) + self.again(x * 0.5))


class DictOutput(nn.Module):
    """A dict of tensors, lists and tuples, with a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        hidden = nn.functional.gelu(self.body(x))
        if scale is not None:
            hidden = hidden * scale
        return {"logits": self.head(hidden), "hidden": [hidden, (hidden.detach(), None)]}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in-place CNN": (InPlaceCNN, (4, 1, 10, 10)),
    "LSTM": (Recurrent, (4, 6, 4)),
    "transformer": (Transformer, (4, 5, 8)),
    "shared": (Shared, (4, 4)),
    "dict output": (DictOutput, (4, 4)),
}

Outcome = dict[str, Tensor]


def train(net: nn.Module, shape: tuple[int, ...], *, steps: int = 3, seed: int = 1) -> Outcome:
    """Train for some steps and give all that a recording could have changed."""
    torch.manual_seed(seed)
    outcome: Outcome = {}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net.train()
    for step in range(steps):
        x = torch.randn(shape, requires_grad=step % 2 == 0)
        keywords = {"scale": torch.randn(4, requires_grad=True)} if isinstance(net, DictOutput) else {}
        optimizer.zero_grad()
        out = net(x, **keywords)
        logits = out["logits"] if isinstance(out, dict) else out
        nn.functional.cross_entropy(logits, torch.randint(3, (shape[0],))).backward()
        outcome[f"{step} output"] = logits.detach().clone()
        for name, tensor in (("x", x), *keywords.items()):
            if tensor.grad is not None:
                outcome[f"{step} {name}.grad"] = tensor.grad.clone()
        outcome |= {f"{step} {name}.grad": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
    outcome |= {name: tensor.clone() for name, tensor in net.state_dict().items()}
    outcome["rng"] = torch.get_rng_state()
    return outcome


def differences(one: Outcome, other: Outcome) -> list[str]:
    """List what differs, bit for bit."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )
