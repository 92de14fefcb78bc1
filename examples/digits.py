"""An ordinary training script that knows nothing of tenterhook: a small CNN on real handwritten digits.

Record it, then look at it:

    tenterhook record examples/digits.py
    tenterhook show @0
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    """Two convolutions with in-place ReLUs, dropout, and some functional operations between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.features(images)
        x = self.dropout(torch.flatten(x, 1))
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, float32 (1797, 1, 8, 8) in [0, 1], and labels, int64 (1797,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load()
    held_out = 360
    train = torch.utils.data.TensorDataset(images[held_out:], labels[held_out:])
    loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
    net = Net()
    loss_function = nn.NLLLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=arguments.lr)
    for epoch in range(arguments.epochs):
        net.train()
        loss = torch.tensor(0.0)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = loss_function(net(batch), target)
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            right = (net(images[:held_out]).argmax(1) == labels[:held_out]).float().mean()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right:.1%} of held-out digits right")


if __name__ == "__main__":
    main()
