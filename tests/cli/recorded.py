"""A training script, and the way to record one."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from tests.cli.programs import environment

__all__ = ["SCRIPT", "record"]


SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 2)
        self.aux = nn.Linear(1, 1)
    def forward(self, x):
        return self.head(self.features(x))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    loss = model(torch.ones(5, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", *sys.argv[1:])
"""


def record(folder: Path, *args: str, fsize: int | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if fsize is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (fsize, fsize))

    return subprocess.run(
        [sys.executable, "-m", "tenterhook", "record", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environment(**changes),
        timeout=120,
        preexec_fn=limit,
    )
