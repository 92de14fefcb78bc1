"""Gradient clipping, layer by layer, that rescues a run which diverges without it.

A recurrent network reads digits row by row with a learning rate that is too high for it: now and then a gradient is huge, and
one such step throws the weights where nothing is learnt any more. Clipping the gradient of each weight keeps it on its way;
the training loop does not change.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tenterhook as th


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.RNN(8, 64, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        states, _ = self.read(images)
        return self.head(states[:, -1])


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    loss = torch.tensor(0.0)
    for _ in range(epochs):
        for rows in torch.randperm(1500, generator=order).split(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
    return loss.item()


def main(epochs: int) -> None:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    for clip in (None, th.edits.clip_norm(0.1)):
        torch.manual_seed(0)
        model = Rows()
        with th.edit(model) as edit:
            if clip:
                edit.param_grad("**", clip)
            loss = train(model, images, labels, epochs)
        with torch.no_grad():
            right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        print(f"{clip or 'no clipping'!s:<16}  last loss {loss:7.4f}  accuracy {right:.3f}")
        if clip:
            print(edit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args().epochs)
