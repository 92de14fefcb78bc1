"""Store what a layer says of every image, then train on that: features of real handwritten digits on disk, and a probe of them.

    python examples/features_to_disk.py features.thk

The loop can be killed and started again: it goes on where it was. The files are plain safetensors; nothing is loaded into
memory before it is looked at.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from digits import Net, load
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tenterhook as th

LAYER = "fc1"


def trained(images: torch.Tensor, labels: torch.Tensor) -> Net:
    """Train a network for a moment; the same at each start."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    for _ in range(5):
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.nll_loss(net(batch), target).backward()
            optimizer.step()
    return net.eval()


def store(net: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], target: Path) -> None:
    """Run the network over all batches, and store the layer's outputs in half precision."""
    options = {"kinds": ["output"], "tensors": True, "tensors_dtype": "float16", "stats": None}
    with th.record(net, LAYER, to=target, resume=True, **options) as rec, torch.no_grad():
        print(f"storing from batch {rec.resumed_from} on")
        for number, (batch,) in enumerate(loader):
            if number >= rec.resumed_from:
                net(batch)


class Labelled(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The stored features, one by one, with their labels."""

    def __init__(self, target: Path, labels: torch.Tensor) -> None:
        self.features = th.open(target)[LAYER].outputs.as_torch().samples()
        self.labels = labels

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index].float(), self.labels[index]


def probe(data: Labelled, train: int) -> float:
    """Train a linear layer on the first of the features; gives the share of the others that it gets right."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(linear.parameters(), lr=1e-2)
    loader = DataLoader(torch.utils.data.Subset(data, range(train)), batch_size=64, shuffle=True)
    for _ in range(5):
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(linear(batch), target).backward()
            optimizer.step()
    with torch.no_grad():
        held_out = [data[index] for index in range(train, len(data))]
        right = [int(linear(features).argmax()) == int(label) for features, label in held_out]
    return sum(right) / len(right)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("features.thk")
    images, labels = load()
    store(trained(images[:1200], labels[:1200]), DataLoader(TensorDataset(images), batch_size=64), target)
    data = Labelled(target, labels)
    size = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
    print(f"{len(data)} features of {LAYER} in {size / 1000:.0f} kB")
    print(f"a linear probe of them gets {probe(data, train=1200):.1%} of held-out digits right")


if __name__ == "__main__":
    main()
