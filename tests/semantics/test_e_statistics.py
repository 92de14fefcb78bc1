"""SEMANTICS.md E: statistics never crash a run (56), and an observer draws no random number (69)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th

TENSORS: dict[str, Callable[[], Tensor]] = {
    "nan": lambda: torch.tensor([1.0, math.nan, -math.inf]),
    "all nan": lambda: torch.full((3,), math.nan),
    "int": lambda: torch.arange(5),
    "uint8": lambda: torch.arange(5, dtype=torch.uint8),
    "empty": lambda: torch.empty(0),
    "empty in one dimension": lambda: torch.empty(3, 0, 2),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j, 3j]),
    "conjugated": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "huge": lambda: torch.zeros(2**24 + 1),
    "huge values": lambda: torch.tensor([3e38, 3e38, -3e38]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "0-d": lambda: torch.tensor(2.0),
    "needs grad": lambda: torch.ones(3, requires_grad=True),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "expanded": lambda: torch.ones(1).expand(5),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
}


class Give(nn.Module):
    """Gives what it is told to, in some container."""

    def __init__(self, tensor: Tensor, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.tensor = [tensor]
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.tensor[0])


WRAPS = {"bare": lambda t: t, "dict": lambda t: {"a": [t]}, "tuple": lambda t: (None, t, 3)}

EXPECTED = {  # absmax, mean
    "nan": (1.0, 1.0), "all nan": (None, None), "int": (4.0, 2.0), "uint8": (4.0, 2.0), "empty": (None, None),
    "empty in one dimension": (None, None), "huge": (0.0, 0.0), "bfloat16": (1.0, 1.0), "float8": (1.0, 1.0), "0-d": (2.0, 2.0),
    "bool": (1.0, 0.5), "needs grad": (1.0, 1.0), "expanded": (1.0, 1.0), "inference": (1.0, 1.0),
    "sparse": (None, None), "csr": (None, None), "quantised": (None, None), "meta": (None, None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:(Sparse CSR tensor support|torch.quantize_per_tensor):UserWarning")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", TENSORS)
def test_a_summary_is_a_value_or_none_and_never_an_error(name: str, wrap: str) -> None:
    """Row 56: of each of these tensors, by itself and in containers."""
    tensor = TENSORS[name]()
    net = nn.Sequential(Give(tensor, WRAPS[wrap]))
    with th.record(net, kinds=["input", "output"], on_error="raise") as rec:
        net(tensor)
    assert rec._capture.failure is None
    rows = rec.query("select absmax, mean, numel, note from values where path = '0'").to_pylist()
    assert len(rows) == 2
    for row in rows:
        for value in (row["absmax"], row["mean"]):
            assert value is None or isinstance(value, float)
        if name in EXPECTED:
            assert (row["absmax"], row["mean"]) == EXPECTED[name]
        assert row["numel"] == tensor.numel() if row["numel"] is not None else row["note"]


@pytest.mark.filterwarnings("ignore:(Sparse CSR tensor support|torch.quantize_per_tensor):UserWarning")
@pytest.mark.parametrize("name", [name for name in TENSORS if name != "huge"])
def test_every_tensor_can_be_kept(name: str) -> None:
    """Row 56, same kind: its copy, too."""
    tensor = TENSORS[name]()
    net = nn.Sequential(Give(tensor, WRAPS["bare"]))
    with th.record(net, "0", kinds=["output"], tensors=True, on_error="raise") as rec:
        out = net(tensor)
    assert out is tensor
    kept = rec["0"].output
    assert (kept.shape, kept.dtype, kept.requires_grad) == (tensor.shape, tensor.dtype, False)


# ---- 69: the random state ----


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)


def _run(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return net(x), torch.get_rng_state()


@pytest.mark.parametrize(
    ("make", "shape"),
    [(_dropout, (4, 8)), (_batch_norm, (4, 2, 6)), (_transformer, (2, 3, 8))],
    ids=["dropout", "batch norm", "transformer"],
)
def test_a_full_capture_draws_no_random_number(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, twin = make(), make()
    twin.load_state_dict(net.state_dict())
    x = torch.randn(shape)
    expected, state = _run(net, x)
    kinds = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
    with th.record(twin, kinds=kinds, tensors=True), th.hooks(twin) as hooks:
        for kind in ("forward_pre", "forward", "backward_pre", "backward", "param_grad"):
            getattr(hooks, kind)("**", lambda *arguments: None)
        out, recorded_state = _run(twin, x)
    assert torch.equal(out, expected)
    assert torch.equal(recorded_state, state)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name))
        if name.endswith("num_batches_tracked"):
            assert buffer.item() == 1
