"""The network of the tasks: three blocks of attention and MLP, without norms, with weights from a seed."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["BLOCKS", "HEADS", "LENGTH", "VOCABULARY", "WIDTH", "Net", "build", "loss", "tokens"]

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 11, 12, 16, 2, 3


class Attention(nn.Module):
    """Returns a tuple, as many do: what is added to the residual stream, and the pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.out((pattern @ v).transpose(1, 2).flatten(-2)), pattern


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x) + self.places.weight[: x.shape[1]]
        for block in self.h:
            y = block(y)
        return self.head(y)

    def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x


def build() -> Net:
    """Make the network: the same one each time."""
    torch.manual_seed(0)
    return Net()


def loss(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def tokens(seed: int, batch: int = 2) -> torch.Tensor:
    """Return random tokens, int64 (batch, 6)."""
    return torch.randint(VOCABULARY, (batch, 6), generator=torch.Generator().manual_seed(seed))
