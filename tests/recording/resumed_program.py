"""Stores a layer's outputs from a loader, slowly, going on where it was killed: resumed_program.py TARGET BATCHES."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import tenterhook as th


def batch(number: int) -> torch.Tensor:
    """Give the batch of a number: always the same."""
    return torch.full((3, 4), float(number))


def net() -> nn.Module:
    """Give the network: always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def main() -> None:
    target, batches = sys.argv[1], int(sys.argv[2])
    model = net()
    with (
        th.record(model, ["", "0"], kinds=["output"], tensors="0", stats=None, to=target, resume=True) as rec,
        torch.no_grad(),
    ):
        print("from", rec.resumed_from, time.time(), flush=True)
        for number in range(rec.resumed_from, batches):
            model(batch(number))
            print(number, time.time(), flush=True)
            time.sleep(0.002)


if __name__ == "__main__":
    main()
