"""On a real accelerator: the rows are those of the host, and the driver itself sees nobody wait within a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.stats import STATISTICS, RowBuffer
from tests.stats.arrays import KINDS, values
from tests.stats.same import assert_same_row, measured
from tests.stats.torch_dtypes import OF_TORCH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here"),
]


@pytest.mark.parametrize("size", [1000, 500_000, 3_000_000])
@pytest.mark.parametrize("dtype", OF_TORCH, ids=lambda dtype: dtype.name)
def test_rows_of_every_dtype(dtype: np.dtype, size: int) -> None:
    from tenterhook.backends._torch_arrays import from_numpy
    from tenterhook.backends.torch import BACKEND

    buffer = RowBuffer(len(KINDS))
    drawn = [values(np.random.default_rng(size), dtype, size, kind) for kind in KINDS]
    for row, array in enumerate(drawn):
        assert BACKEND.measure(from_numpy(array).cuda(), buffer, row) is None
    assert buffer.settle() == {}
    for row, array in enumerate(drawn):
        alone = RowBuffer(1)
        alone.statistics[0], alone.sketches[0] = buffer.statistics[row], buffer.sketches[row]
        alone.digests[0], alone.valid[0] = buffer.digests[row], buffer.valid[row]
        assert_same_row(alone, measured("numpy", array), array)


def test_nothing_waits_within_a_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4096, 64, device="cuda")
    with th.record(model) as rec:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                model(x).square().mean().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            optimizer.zero_grad()
    on_device = rec.table("values")
    assert on_device.column("mean").null_count == 0
    assert on_device.column("sketch").null_count == 0


def test_several_streams() -> None:
    model = nn.Identity().cuda()
    streams = [torch.cuda.Stream() for _ in range(4)]
    with th.record(model, kinds=("output",)) as rec:
        for at in range(40):
            with torch.cuda.stream(streams[at % 4]):
                model(torch.full((1000 if at % 2 else 300_000,), float(at), device="cuda"))
    assert rec.table("values").column(STATISTICS[STATISTICS.index("mean")]).to_pylist() == [
        float(at) for at in range(40)
    ]
