"""Trains from its own checkpoint, recorded: resumed_training.py TARGET CHECKPOINT STEPS SAVE_EVERY EVERY HOLD_AT.

It saves a checkpoint every SAVE_EVERY steps and begins at the one that is there. After step 10 it rests until the rows so far
are on the disk; at HOLD_AT it waits to be killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import tenterhook as th

REST_AFTER = 10


def batch(step: int) -> torch.Tensor:
    """Give the batch of a step: always the same."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Give the network and its optimizer as they are before the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make one step."""
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()


def main() -> None:
    target, checkpoint = sys.argv[1], Path(sys.argv[2])
    steps, save_every, every, hold_at = map(int, sys.argv[3:7])
    model, optimizer = training()
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    with th.record(
        model, "**", to=target, tensors="0", kinds=["output", "grad_output"], every=every, resume=begin
    ) as rec:
        assert rec.resumed_from == begin
        for step in range(begin, steps):
            if step == hold_at:
                print("holds", flush=True)
                time.sleep(600)
            train(model, optimizer, step)
            if (step + 1) % save_every == 0:
                draft = checkpoint.with_suffix(".tmp")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, draft)
                draft.replace(checkpoint)
            if step == REST_AFTER:
                time.sleep(2.5)


if __name__ == "__main__":
    main()
