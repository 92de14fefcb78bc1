"""Row 53: what part of a distributed tensor this process has, where its process group is initialised anew."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th

distributed = pytest.importorskip("torch.distributed")
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this build of torch is not distributed")

WHOLE = (5, 3)


@contextlib.contextmanager
def process_group(rank: int, world: int) -> Iterator[None]:
    """Have this process be one of several, of which the others are not there."""
    excepthook = sys.excepthook
    distributed.init_process_group("fake", rank=rank, world_size=world, store=fake.FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
        sys.excepthook = excepthook  # torch leaves one of its own


class Distributes(nn.Module):
    """Gives its input, this process's part of a whole, as a distributed tensor."""

    def __init__(self, mesh: Any, placements: list[Any]) -> None:
        super().__init__()
        self.mesh, self.placements = mesh, placements

    def forward(self, local: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(WHOLE), stride=(WHOLE[1], 1)
        )


def recorded(mesh_shape: tuple[int, ...], places: list[Any], local: Tensor) -> dict[str, Any]:
    mesh = distributed.device_mesh.init_device_mesh("cpu", mesh_shape)
    with th.record(model := Distributes(mesh, places), kinds=["output"]) as rec:
        model(local)
    return rec.table("values").to_pylist()[0]


def sketch_of(local: Tensor, rows: slice) -> Any:
    """The sketch of a tensor that is 0 but for the part."""
    whole = torch.zeros(WHOLE)
    whole[rows] = local
    with th.record(model := nn.Identity(), kinds=["output"]) as rec:
        model(whole)
    return rec.table("values").to_pylist()[0]["sketch"]


ROWS = {
    (2, 0): slice(0, 3), (2, 1): slice(3, 5), (4, 0): slice(0, 2), (4, 1): slice(2, 4), (4, 2): slice(4, 5), (5, 4): slice(4, 5),
}  # fmt: skip


@pytest.mark.parametrize("order", [list(ROWS), list(reversed(ROWS))], ids=["up", "down"])
def test_the_part_is_that_of_the_present_process_group(order: list[tuple[int, int]]) -> None:
    """The same mesh, of the same processes, and this one is another of them; or there are more."""
    from torch.distributed.tensor import Shard

    for world, rank in order:
        rows = ROWS[world, rank]
        local = torch.arange(1.0, 16.0).reshape(WHOLE)[rows]
        with process_group(rank, world):
            row = recorded((world,), [Shard(0)], local)
        assert row["shard"] == [rows.start, 0], (world, rank)
        assert row["sketch"] == pytest.approx(sketch_of(local, rows)), (world, rank)


def test_in_a_mesh_of_two_dimensions() -> None:
    """The same number of processes in another mesh, and other places in it."""
    from torch.distributed.tensor import Replicate, Shard

    seen = []
    for rank in range(4):
        with process_group(rank, 4):
            for shape, places in (
                ((2, 2), [Shard(0), Replicate()]),
                ((2, 2), [Replicate(), Shard(0)]),
                ((1, 4), [Replicate(), Shard(0)]),
            ):
                rows = torch.zeros({(2, 2): 3, (1, 4): 2}[shape], 3)
                seen.append((rank, recorded(shape, places, rows)["shard"][0]))
    assert seen == [
        (0, 0), (0, 0), (0, 0), (1, 0), (1, 3), (1, 2), (2, 3), (2, 0), (2, 4), (3, 3), (3, 3), (3, 5),
    ]  # fmt: skip


def test_where_this_process_has_no_part_any_more() -> None:
    """Of four processes that share five rows the last has none."""
    from torch.distributed.tensor import Shard

    notes = []
    for rank in (0, 3):
        with process_group(rank, 4):
            notes.append(recorded((4,), [Shard(0)], torch.zeros(0 if rank == 3 else 2, 3)))
    assert [note["shard"] for note in notes] == [[0, 0], [5, 0]]
