"""What a recording costs on an accelerator: training steps with and without it in turn; medians of the ratios.

    python -m benchmarks.device [--device cuda] [--models small_cnn,transformer] [--rounds 20]

Beside it stands what it would cost to copy each tensor to the host as it is seen. With ``--device cpu`` the tensors of the host
take the path of an accelerator: that shows that it runs, not what it costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import tenterhook as th
from benchmarks.models import MODELS, build
from tenterhook.backends import _torch_device as devices
from tenterhook.backends.torch import TorchBackend
from tenterhook.stats import RowBuffer
from tenterhook.stats.layout import DTYPES


def train(net: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Run one step of training and wait for it."""
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()


def copied_one_by_one(tensor: torch.Tensor, rows: RowBuffer, row: int, *, code: int, offset: int | None) -> None:
    """Measure a tensor as ``defer`` does, but at once: by waiting for a copy of it."""
    host = tensor.cpu()
    rows.measure(row, host.data_ptr(), DTYPES[code].name, tuple(host.shape), tuple(host.stride()), offset or 0)


def seconds(step: Callable[[], None]) -> float:
    """Time a few steps."""
    start = time.perf_counter()
    for _ in range(5):
        step()
    return time.perf_counter() - start


def ratios(name: str, device: torch.device, rounds: int) -> tuple[float, float, float]:
    """Return milliseconds of a bare step, and the medians of the ratios of a recorded one: deferred, and copied one by one."""
    torch.manual_seed(0)
    net, x = build(name)
    net, x = net.to(device), x.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> None:
        train(net, x, optimizer)

    def recorded() -> float:
        with th.record(net):
            step()
            return seconds(step)

    step()
    bare, deferred, copied = [], [], []
    for _ in range(rounds):
        bare.append(seconds(step))
        deferred.append(recorded() / bare[-1])
        with mock.patch.object(devices, "defer", copied_one_by_one):
            copied.append(recorded() / bare[-1])
    return 1e3 * statistics.median(bare) / 5, statistics.median(deferred), statistics.median(copied)


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description="Measure what a recording costs on an accelerator.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        TorchBackend.measure = TorchBackend._measure_unusual
        TorchBackend.defers = lambda self, tensor: True
    print(f"{'model':>12} {'bare step, ms':>14} {'recorded':>9} {'copied one by one':>18}")
    for name in options.models.split(","):
        bare, deferred, copied = ratios(name, device, options.rounds)
        print(f"{name:>12} {bare:>14.2f} {deferred:>9.2f} {copied:>18.2f}", flush=True)


if __name__ == "__main__":
    main()
