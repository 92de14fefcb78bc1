"""No operation of the device path hands a value to the host, or takes one from it, but the one transfer a step.

There is no accelerator here: the device ``meta`` stands for one where single operations are looked at, and tensors of the host
take the path of a device's where whole trainings are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tenterhook as th
from tenterhook.backends import _torch_device as devices
from tenterhook.backends import _torch_measuring as measuring
from tenterhook.backends.torch import BACKEND, TorchBackend
from tenterhook.stats import RowBuffer
from tests.stats.torch_dtypes import OF_TORCH

WAITS = frozenset(
    "aten::item aten::_local_scalar_dense aten::nonzero aten::is_nonzero aten::equal aten::masked_select aten::unique_dim "
    "aten::_unique2 aten::allclose aten::bincount aten::repeat_interleave".split()
)
TO_HOST = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "update")


class Crossings(TorchDispatchMode):
    """Notes each operation that asks for values or has tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        result = func(*args, **(kwargs or {}))
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs, result))
        places = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if len(places) > 1 or func._schema.name in WAITS:
            self.found.append(f"{func} {places}")
        return result


@pytest.mark.parametrize("numel", [4096, 5000, 2049])
@pytest.mark.parametrize("dtype", OF_TORCH, ids=lambda dtype: dtype.name)
def test_no_operation_of_a_measurement_crosses_between_devices(dtype: np.dtype, numel: int) -> None:
    part = torch.empty(numel + 1, device="meta").to(getattr(torch, dtype.name))[1:]
    counts, sums = torch.empty(6, dtype=torch.int64, device="meta"), torch.empty(70, dtype=torch.float64, device="meta")
    with Crossings() as crossings:
        measuring.write_part(part, 0, 5, 7, counts=counts, sums=sums)
    assert crossings.seen > 30
    assert crossings.found == []


def test_no_operation_of_a_snapshot_and_its_difference_asks_for_a_value() -> None:
    parameter = nn.Parameter(torch.empty(30, 40, device="meta"))
    with Crossings() as crossings:
        BACKEND.difference(parameter, BACKEND.snapshot(parameter))
    assert crossings.seen and crossings.found == []


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tensors of the host take the path of a device's; whatever brings a value to the host is noted."""
    seen: list[str] = []
    monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)
    monkeypatch.setattr(TorchBackend, "measure", TorchBackend._measure_unusual)
    monkeypatch.setattr(TorchBackend, "defers", lambda self, tensor: True)
    monkeypatch.setattr(devices, "_COPIED", 2048)
    for name in TO_HOST:
        genuine = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, _name: str = name, _genuine: Any = genuine, **kwargs: Any) -> Any:
            seen.append(_name)
            return _genuine(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noted)
    to = torch.Tensor.to

    def noted_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "cpu" in (*map(str, args), str(kwargs.get("device"))) and not kwargs.get("non_blocking"):
            seen.append("to")
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted_to)
    yield seen


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 60), nn.ReLU(inplace=True), nn.LayerNorm(60), nn.Linear(60, 3))


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    return distribute_module(net(), mesh, shard)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """One process of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")  # torch 2.6
@pytest.mark.parametrize(("make", "ops"), [(net, False), (net, True), (sharded, False)], ids=["", "ops", "sharded"])
def test_a_training_brings_over_one_parcel_a_step(
    transfers: list[str], make: Callable[[], nn.Module], ops: bool
) -> None:
    """Gradients, parameters, their updates and shards are among what is recorded."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(200, 16)
    if make is sharded:
        from torch.distributed.tensor import Replicate, distribute_tensor

        x = distribute_tensor(x, next(iter(model.parameters())).device_mesh, [Replicate()])  # type: ignore[attr-defined]

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    transfers.clear()
    step()
    of_the_model = transfers.copy()  # what torch and the model do themselves
    transfers.clear()
    with th.record(model, kinds=KINDS, ops=ops, on_error="raise") as rec:
        step()  # of a layout of shards torch is asked once
        transfers.clear()
        for at in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step()
            names = {event.name for event in profile.events() or ()}
            assert "aten::gather" in names, "operations of ours are among those seen"
            assert not names & WAITS
            assert transfers == of_the_model, f"in step {at}"
            transfers.clear()
    assert sorted(set(transfers)) == ["cpu", "numpy"], "what is left at the end is brought over there"
    assert transfers.count("cpu") == 4
    table = rec.table("values").to_pylist()
    assert {row["kind"] for row in table} == set(KINDS)
    assert all(row["numel"] for row in table if not (row["note"] or "").startswith("no gradient"))


def test_the_digest_of_a_tensor_of_a_device_is_told_at_once(transfers: list[str]) -> None:
    """Callbacks that change what they were given are found out by it."""
    from tenterhook import changing

    ones, twos = torch.ones(5000), torch.full((5000,), 2.0)
    host = RowBuffer(1)
    host.measure_array(0, np.ones(5000, np.float32))
    assert changing._digest(BACKEND, ones) == int(host.digests[0])
    assert changing._digest(BACKEND, twos) != changing._digest(BACKEND, ones)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ops", [False, True])
def test_a_mode_of_the_users_changes_nothing_in_that(transfers: list[str], ops: bool) -> None:
    model, x = net(), torch.randn(200, 16)

    def step() -> None:
        with Watching():
            model(x).square().mean().backward()

    step()
    transfers.clear()
    step()
    of_the_model = transfers.copy()
    with th.record(model, ops=ops, on_error="raise") as rec:
        for _ in range(3):
            transfers.clear()
            step()
            rec.step()
            assert transfers == of_the_model
            table = rec.table("values")
            assert transfers == [*of_the_model, "cpu", "numpy"], "one parcel"
    assert table["numel"].null_count == table["sketch"].null_count == 0
    assert len(table) == 3 * 2 * 5
