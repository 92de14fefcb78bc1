"""A tensor that cannot be kept has its row, and a note that says why; the recording goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import NotRecordedError
from tenterhook.recording.writer import DiskSink
from tests.odd_tensors import RefusesOperations, fake

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of (nested|Masked):UserWarning")

MEMORY, DISK = "memory", "disk"
BOTH = (MEMORY, DISK)


def ragged(layout: torch.layout, *, turned: bool = False) -> Tensor:
    tensor = torch.nested.nested_tensor([torch.ones(3, 4), torch.full((5, 4), torch.nan)], layout=layout)
    return tensor.transpose(1, 2) if turned else tensor


def let_go(left: int) -> Tensor:
    tensor = torch.ones(50_000)
    tensor.untyped_storage().resize_(left)
    return tensor


NESTED = "nested tensor has no array of one shape"
ODD: dict[str, tuple[Callable[[], Tensor], str, tuple[str, ...]]] = {
    "meta": (lambda: torch.empty(5, 6, device="meta"), "meta tensor has no data", (DISK,)),
    "fake": (fake, "fake tensor has no data", (DISK,)),
    "nested": (lambda: ragged(torch.strided), NESTED, (DISK,)),
    "nested, turned": (lambda: ragged(torch.strided, turned=True), NESTED, (DISK,)),
    "jagged": (lambda: ragged(torch.jagged), NESTED, (DISK,)),
    "jagged, turned": (lambda: ragged(torch.jagged, turned=True), NESTED, (DISK,)),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "MaskedTensor raised ",
        (DISK,),
    ),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "NumPy has no dtype bits8", (DISK,)),
    "refuses": (
        lambda: RefusesOperations(torch.ones(3)),
        "RefusesOperations raised PermissionError: not this one",
        BOTH,
    ),
    "let go": (lambda: let_go(0), "its storage was let go", BOTH),
    "cut short": (lambda: let_go(4096), "its storage has been made smaller than it is", BOTH),
}
if hasattr(torch, "float4_e2m1fn_x2"):  # since 2.8
    ODD["two in a byte"] = (
        lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "NumPy has no dtype float4_e2m1fn_x2",
        (DISK,),
    )
if hasattr(torch, "uint4"):
    ODD["uint4"] = (lambda: torch.empty(4, dtype=torch.uint4), "Tensor raised NotImplementedError: ", BOTH)

REFUSES_HALVES = {"nested, turned", "two in a byte"}  # of which torch makes none of another dtype


class Give(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.held = [tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.held[0]


class Net(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.odd = Give(tensor)
        self.usual = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.odd(x)
        return self.usual(x)


@pytest.fixture(params=["native", "by Python"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by Python":
        monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)
    return request.param


def target(tmp_path: Path, place: str) -> dict[str, Any]:
    return {"to": tmp_path / "one.thk"} if place == DISK else {}


def odd_row(rec: Any) -> dict[str, Any]:
    (row,) = (row for row in rec.table("values").to_pylist() if row["path"] == "odd" and row["kind"] == "output")
    return row


def check_usual(rec: Any, net: Net, x: Tensor) -> None:
    assert rec.coverage.fired == ["(root)", "odd", "usual"]
    assert "partial" not in str(getattr(rec, "recording", rec))
    np.testing.assert_array_equal(np.asarray(rec["usual"].output), net.usual(x).detach().numpy())


@pytest.mark.parametrize("place", BOTH)
@pytest.mark.parametrize("name", ODD)
def test_the_row_says_why_and_the_recording_goes_on(name: str, place: str, calls: str, tmp_path: Path) -> None:
    make, why, where = ODD[name]
    net, x = Net(make()), torch.ones(1, 2)
    with th.record(net, tensors=True, on_error="raise", **target(tmp_path, place)) as rec:
        net(x)
    for read in (rec, th.open(tmp_path / "one.thk")) if place == DISK else (rec,):
        check_usual(read, net, x)
        row = odd_row(read)
        if place not in where:
            assert row["tensor"] is not None
            assert "not kept" not in (row["note"] or "")
            continue
        assert row["tensor"] is None
        assert f"tensor not kept: {why}" in row["note"]
        assert "\n" not in row["note"]
        value = read["odd"].output
        with pytest.raises(NotRecordedError, match="tensor not kept") as refused:
            _ = value.tensor
        assert "stores tensors" not in str(refused.value)


@pytest.mark.parametrize("place", BOTH)
@pytest.mark.parametrize("name", ODD)
def test_another_dtype_changes_nothing(name: str, place: str, calls: str, tmp_path: Path) -> None:
    make, _, where = ODD[name]
    net = Net(make())
    with th.record(net, tensors=True, tensors_dtype="float16", on_error="raise", **target(tmp_path, place)) as rec:
        net(torch.ones(1, 2))
    row = odd_row(rec)
    assert rec.coverage.fired == ["(root)", "odd", "usual"]
    kept = place not in where and name not in REFUSES_HALVES
    assert (row["tensor"] is not None, "tensor not kept" in (row["note"] or "")) == (kept, not kept)


def test_what_the_statistics_say_comes_first(calls: str, tmp_path: Path) -> None:
    net = Net(torch.empty(3, device="meta"))
    with th.record(net, tensors=True, to=tmp_path / "one.thk") as rec:
        net(torch.ones(1, 2))
    assert odd_row(rec)["note"] == "meta tensor: no values; tensor not kept: meta tensor has no data"


@pytest.mark.parametrize("name", [name for name, (_, _, where) in ODD.items() if where == (DISK,)])
def test_saving_what_only_memory_can_hold(name: str, tmp_path: Path) -> None:
    make, why, _ = ODD[name]
    net, x = Net(make()), torch.ones(1, 2)
    with th.record(net, tensors=True) as rec:
        net(x)
    rec.save(tmp_path / "saved.thk")
    saved = th.open(tmp_path / "saved.thk")
    check_usual(saved, net, x)
    assert (odd_row(saved)["tensor"], f"tensor not kept: {why}" in odd_row(saved)["note"]) == (None, True)


def test_a_parameter_without_data(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.ReLU())
    with th.record(net, kinds=["output", "param"], tensors=True, to=tmp_path / "one.thk", on_error="raise") as rec:
        net(torch.ones(2, 3, device="meta"))
    notes = {row["note"] for row in rec.table("values").to_pylist()}
    assert notes == {"meta tensor: no values; tensor not kept: meta tensor has no data"}
    assert th.open(tmp_path / "one.thk").manifest.partial is None


def test_a_fault_of_the_disk_is_none_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DiskSink, key: str, tensor: Any) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskSink, "write_tensor", full)
    net = Net(torch.ones(2))
    with (
        pytest.raises(OSError, match="No space"),
        th.record(net, tensors=True, to=tmp_path / "one.thk", on_error="raise"),
    ):
        net(torch.ones(1, 2))


def test_of_a_script(tmp_path: Path) -> None:
    script, place = tmp_path / "train.py", tmp_path / "run.thk"
    script.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.dry, self.real = torch.nn.Linear(3, 3, device='meta'), torch.nn.Linear(2, 2)\n"
        "    def forward(self, x, y):\n"
        "        return self.dry(x), self.real(y)\n"
        "Net()(torch.ones(2, 3, device='meta'), torch.ones(1, 2))\n"
    )
    command = [sys.executable, "-m", "tenterhook", "record", "--tensors", "--to", str(place), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rec = th.open(place)
    kept = {(row["path"], row["device"], row["tensor"] is not None) for row in rec.table("values").to_pylist()}
    assert kept == {
        ("", "meta", False), ("", "cpu", True), ("dry", "meta", False), ("real", "cpu", True)
    }  # fmt: skip
    assert rec.manifest.partial is None
