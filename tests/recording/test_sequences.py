"""Stored tensors as a data set: sample by sample, in torch's own loader, in other processes."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tenterhook as th
from tenterhook.errors import NotRecordedError, TenterhookError


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 4, generator=generator) for size in (3, 3, 2)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, batches: list[torch.Tensor]) -> Path:
    path = tmp_path_factory.mktemp("features") / "a.thk"
    model = nn.Identity()
    with th.record(model, kinds=["output"], tensors=True, stats=None, to=path), torch.no_grad():
        for batch in batches:
            model(batch)
    return path


def test_batches_and_samples(target: Path, batches: list[torch.Tensor]) -> None:
    outputs = th.open(target)[""].outputs
    assert [output.shape for output in outputs] == [(3, 4), (3, 4), (2, 4)]
    samples = outputs.samples()
    assert len(samples) == 8
    assert np.array_equal(np.stack(list(samples)), torch.cat(batches).numpy())
    assert np.array_equal(samples[-1], batches[2][1].numpy()) and np.array_equal(samples[3:5][1], batches[1][1].numpy())
    with pytest.raises(IndexError, match="sample 8 of 8"):
        samples[8]


def test_an_item_is_read_from_the_file_only_when_its_elements_are(target: Path) -> None:
    item = th.open(target)[""].outputs[0]
    base = item
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)


def test_what_is_given_can_be_written_to_and_changes_nothing_else(target: Path, batches: list[torch.Tensor]) -> None:
    recording = th.open(target)
    outputs = recording[""].outputs
    held = [outputs[0], outputs[1], recording[""].calls[0].output]
    for item in held:
        item[:] += 100
    assert np.array_equal(outputs[0], batches[0].numpy()) and np.array_equal(outputs[1], batches[1].numpy())
    sample = outputs.samples()[0]
    sample[:] = 7
    assert np.array_equal(outputs.samples()[0], batches[0][0].numpy())
    assert np.array_equal(outputs.as_torch()[0].numpy(), batches[0].numpy())
    assert all(item[0, 0] == batch[0, 0] + 100 for item, batch in zip(held, batches[:2], strict=False))
    assert np.array_equal(th.open(target)[""].outputs[0], batches[0].numpy())


def test_a_tensor_can_be_asked_for_any_number_of_times(target: Path, batches: list[torch.Tensor]) -> None:
    """More often than a process may have files open."""
    outputs = th.open(target)[""].outputs
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        held = [outputs[1] for _ in range(1000)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    held[0][:] = 0
    assert np.array_equal(held[-1], batches[1].numpy())


def test_torch_takes_what_is_given_without_a_warning(target: Path, batches: list[torch.Tensor]) -> None:
    """Warnings are errors here: torch has one for arrays that cannot be written to."""
    outputs = th.open(target)[""].outputs
    assert torch.equal(torch.from_numpy(outputs[0]), batches[0])
    assert torch.equal(torch.as_tensor(outputs[2]), batches[2])
    assert torch.equal(torch.from_numpy(outputs.samples()[-1]), batches[2][1])
    assert torch.equal(torch.cat(list(DataLoader(outputs, batch_size=None))), torch.cat(batches))  # type: ignore[arg-type]
    assert torch.equal(torch.cat(list(DataLoader(outputs.samples(), batch_size=5))), torch.cat(batches))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loads_samples_in_workers(target: Path, batches: list[torch.Tensor], workers: int) -> None:
    samples = th.open(target)[""].outputs.as_torch().samples()
    context = "spawn" if workers else None
    loader = DataLoader(samples, batch_size=3, num_workers=workers, multiprocessing_context=context)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(list(loader)), torch.cat(batches))
    shuffled = DataLoader(samples, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    (all_of_them,) = list(shuffled)
    assert sorted(all_of_them.tolist()) == sorted(torch.cat(batches).tolist())


@pytest.mark.slow
def test_torch_loads_in_workers_as_its_default_is(target: Path, batches: list[torch.Tensor]) -> None:
    """Forked ones, on Linux: of a program that has looked at the tensors before."""
    program = """
import sys, torch
from torch.utils.data import DataLoader
import tenterhook as th
outputs = th.open(sys.argv[1])[""].outputs.as_torch()
whole = torch.cat([outputs[number] for number in range(len(outputs))])
loader = DataLoader(outputs.samples(), batch_size=3, num_workers=2, persistent_workers=True)
for epoch in range(2):
    assert torch.equal(torch.cat(list(loader)), whole)
print(whole.sum().item())
"""
    command = [sys.executable, "-c", program, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == torch.cat(batches).sum().item()


def test_a_pickle_holds_no_tensors(target: Path, batches: list[torch.Tensor]) -> None:
    outputs = th.open(target)[""].outputs
    before = len(pickle.dumps(outputs))
    for output in outputs:  # maps the shards
        output.sum()
    assert len(pickle.dumps(outputs)) == before
    again = pickle.loads(pickle.dumps(outputs))
    assert np.array_equal(again[2], batches[2].numpy())


@pytest.mark.parametrize(
    ("dtype", "numpy"),
    [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32), ("float64", np.float64)],
)
def test_tensors_are_stored_in_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str, numpy: type) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    model = nn.Identity()
    with th.record(model, kinds=["output"], tensors=True, tensors_dtype=dtype, to=tmp_path / "a.thk"):
        model(x)
        model(torch.arange(3))
    first, second = th.open(tmp_path / "a.thk")[""].outputs
    assert first.dtype == numpy and np.array_equal(first, x.numpy().astype(numpy))
    assert second.dtype == np.int64  # only real numbers are turned into others
    (row, _) = th.open(tmp_path / "a.thk").table("values").to_pylist()
    assert row["dtype"] == "float32" and row["max"] == float(x.max())  # what is said of it is said of it as it came


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(TenterhookError, match="tensors_dtype='int8' is not known"):
        th.record(nn.Identity(), tensors=True, tensors_dtype="int8")
    model = nn.Identity()
    with th.record(model, kinds=["output"], tensors=True, to=tmp_path / "a.thk"):
        model(torch.tensor(1.0))
    with pytest.raises(NotRecordedError, match="single numbers"):
        th.open(tmp_path / "a.thk")[""].outputs.samples()
