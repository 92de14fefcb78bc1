"""Whatever flows through a model has its row: its values, or null and a reason. End to end, on the host and by a device's path."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.backends import _torch_device as devices
from tenterhook.backends._torch_native import storage_access
from tenterhook.backends.torch import BACKEND, TorchBackend
from tenterhook.stats import STATISTICS, describe, merge
from tenterhook.stats.layout import COMPLEX32
from tests.odd_tensors import RefusesOperations, fake

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is",  # torch compiles decompositions for forward mode with it
    "ignore:(Sparse (CSR|BSR|CSC) tensor support|torch.quantize_per|The PyTorch API of (nested|Masked)|ComplexHalf):UserWarning",
)

BASE = torch.arange(-30.0, 30.0).view(5, 3, 4)
COMPLEX = torch.complex(BASE, BASE.flip(0))


class Refuses(Tensor):
    """Refuses whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PermissionError(func)


VALUES: dict[str, Callable[[], Tensor]] = {
    "contiguous": BASE.clone,
    "transposed": lambda: BASE.transpose(0, 2),
    "a column": lambda: BASE[:, 1, 2],
    "every other": lambda: BASE[::2, :, 1::2],
    "from an odd place": lambda: BASE.view(-1)[7:],
    "flipped": lambda: BASE.flip(0, 2),
    "expanded": lambda: BASE[:1, :, :1].expand(5, 3, 4),
    "one element, a thousand times": lambda: torch.full((1,), 2.5).expand(1000),
    "overlapping": lambda: BASE.view(-1).as_strided((20, 9), (2, 1)),
    "windows": lambda: BASE.view(-1).unfold(0, 8, 3),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "0-d": lambda: torch.tensor(-3.5),
    "empty": lambda: torch.empty(0, 4),
    "a view with no element": lambda: BASE[:, 3:],
    "conjugated": COMPLEX.conj,
    "conjugated and transposed": lambda: COMPLEX.conj().transpose(0, 1),
    "negated view": lambda: COMPLEX.conj().imag,
    "real part": lambda: COMPLEX.real,
    "not finite": lambda: torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, -0.0]),
    "subnormal": lambda: torch.tensor([1e-42, -1e-45, 0.0]),
    "parameter": lambda: nn.Parameter(BASE.clone()),
    "needs a gradient": lambda: (BASE * 1).requires_grad_() * 2,
    "of an inference": lambda: torch.inference_mode()(torch.ones)(3),
    "negated and dense": lambda: torch._neg_view(BASE.clone()),  # type: ignore[attr-defined]
    "nothing but zeros": lambda: torch._efficientzerotensor(7),  # type: ignore[attr-defined]
    "at an odd address": lambda: torch.frombuffer(bytearray(range(41)), dtype=torch.float32, offset=1, count=10),
    "of NumPy": lambda: torch.from_dlpack(np.arange(6.0)[::2]),
    "the least and the greatest": lambda: torch.tensor([-(2**63), 2**63 - 1]),
    "the greatest without a sign": lambda: torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
    "of 70 dimensions": lambda: BASE.view([1] * 67 + [5, 3, 4]),
    "of 70 dimensions, turned": lambda: BASE.view([1] * 67 + [5, 3, 4]).transpose(-1, 67),
    "of 12 dimensions, turned": lambda: torch.arange(4096.0).view([2] * 12).permute(*range(11, -1, -1)),
    "no element, far apart": lambda: torch.empty(0).as_strided((0, 5), (2**60, 2**61)),
    "one element, far apart": lambda: torch.ones(1).as_strided((1, 1), (2**62, 2**62)),
    "complex of halves": lambda: COMPLEX.to(torch.complex32),
    "complex of halves, conjugated": lambda: COMPLEX.to(torch.complex32).conj()[::2].transpose(0, 1),
    "powers of two": lambda: torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "a subclass that refuses to be asked": lambda: BASE.clone().as_subclass(Refuses),
    "a subclass that refuses operations": lambda: RefusesOperations(BASE.transpose(0, 1)),
    "a subclass": lambda: BASE.clone().as_subclass(type("Marked", (Tensor,), {})),
}

NO_VALUES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta tensor: no values"),
    "fake": (fake, "fake tensor: no values"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse tensor (sparse_coo): no statistics"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse tensor (sparse_csr): no statistics"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor: no statistics"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested tensor: no statistics",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quantised tensor: no statistics",
    ),
    "quantised by channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "quantised tensor: no statistics",
    ),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "no statistics for dtype bits8"),
    "two in a byte": (
        lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "no statistics for dtype float4_e2m1fn_x2",
    ),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "sparse tensor (sparse_bsr): no statistics"),
    "csc": (lambda: torch.eye(4).to_sparse_csc(), "sparse tensor (sparse_csc): no statistics"),
    "mkldnn": (lambda: torch.ones(3, 4).to_mkldnn(), "tensor of layout _mkldnn: no statistics"),
    "functional": (lambda: torch._to_functional_tensor(BASE), "Tensor: no storage of its own"),  # type: ignore[attr-defined]
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "MaskedTensor: no storage of its own",
    ),
}

if not hasattr(torch, "float8_e8m0fnu"):  # before 2.7
    del VALUES["powers of two"]
if not hasattr(torch, "float4_e2m1fn_x2"):  # before 2.8
    del NO_VALUES["two in a byte"]


class Give(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.held = [tensor]

    def forward(self, x: Any) -> Tensor:
        return self.held[0]


@pytest.fixture(params=["host", "host, by Python", "copied", "in parts"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Measure on the host, or as of a device: copied and measured later, or measured where it lies."""
    if request.param != "host":
        monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)
    if not request.param.startswith("host"):
        monkeypatch.setattr(TorchBackend, "measure", TorchBackend._measure_unusual)
        monkeypatch.setattr(TorchBackend, "defers", lambda self, tensor: True)
    if request.param == "in parts":
        monkeypatch.setattr(devices, "_COPIED", 0)
    return request.param


def row_of(tensor: Tensor) -> dict[str, Any]:
    model = nn.Sequential(Give(tensor))
    with th.record(model, kinds=["output"], on_error="raise") as rec:
        assert model(None) is tensor
    assert rec._capture.failure is None
    row, of_root = rec.table("values").to_pylist()
    same = ("shape", "note", "digest", "numel")
    assert [row[name] for name in same] == [of_root[name] for name in same]
    return row


def dense(tensor: Tensor) -> np.ndarray:
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
        if copy.dtype is torch.complex32:
            return torch.view_as_real(copy).numpy().view(COMPLEX32)
        return np.ascontiguousarray(BACKEND.to_numpy(copy))


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, path: str) -> None:
    tensor = VALUES[name]()
    row, expected = row_of(tensor), describe(dense(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        assert row["shape"] == list(tensor.shape)
    assert (row["digest"], row["note"]) == (expected["digest"], None)
    for statistic in STATISTICS:
        if expected[statistic] is None:
            assert row[statistic] is None, statistic
        else:
            assert row[statistic] == pytest.approx(expected[statistic], rel=1e-6, abs=1e-50), statistic
    np.testing.assert_allclose(row["sketch"], expected["sketch"], rtol=1e-5, atol=1e-5 * abs(expected["rms"] or 0))


def test_every_byte_of_a_bool_but_zero_is_true(path: str) -> None:
    row = row_of(torch.tensor([0, 1, 2, 128, 255], dtype=torch.uint8).view(torch.bool))
    assert (row["min"], row["max"], row["mean"], row["zero_count"], row["note"]) == (0, 1, 0.8, 1, None)
    assert row["sketch"] == describe(np.array([0, 1, 1, 1, 1], bool))["sketch"].tolist()


@pytest.mark.parametrize("name", NO_VALUES)
def test_null_and_a_reason(name: str, path: str) -> None:
    make, note = NO_VALUES[name]
    row = row_of(make())
    assert row["note"] == note
    assert all(row[column] is None for column in (*STATISTICS, "sketch", "digest"))


@pytest.mark.parametrize(
    "dtype",
    sorted(
        {
            d
            for d in vars(torch).values()
            if isinstance(d, torch.dtype) and "quint" not in str(d) and "qint" not in str(d)
        },
        key=str,
    ),
    ids=str,
)
def test_every_dtype_of_torch(dtype: torch.dtype, path: str) -> None:
    """A value where it can be had; for what is left a reason that names the dtype."""
    try:
        tensor = torch.ones(7, 5).to(dtype) if not dtype.is_complex else torch.ones(7, 5, dtype=dtype)
    except (RuntimeError, NotImplementedError, TypeError):
        tensor = torch.empty(7, 5, dtype=torch.uint8)
        try:
            tensor = tensor.view(dtype) if dtype.itemsize == 1 else torch.empty(7, 5, dtype=dtype)
        except (RuntimeError, NotImplementedError, TypeError):
            pytest.skip(f"torch makes no tensors of {dtype} here")
    row = row_of(tensor)
    name = str(dtype).removeprefix("torch.")
    if row["note"] is None:
        assert (row["dtype"], row["numel"], row["mean"], row["std"]) == (name, 35, 1.0, 0.0)
    else:
        assert row["note"] in (f"no statistics for dtype {name}", "quantised tensor: no statistics")
        assert row["numel"] is None


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.vjp, torch.func.jacrev, torch.func.jacfwd])
def test_tensors_of_function_transforms(transform: Callable[..., Any], path: str) -> None:
    model, x = nn.Identity(), torch.randn(6, 4)
    with th.record(model, kinds=["output"], on_error="raise") as rec:
        transform(model, x) if transform is torch.func.vjp else transform(model)(x)
    row = rec.table("values").to_pylist()[0]
    assert row["numel"] in (24, 576)  # jacfwd runs all directions at once
    assert row["mean"] == pytest.approx(float(x.mean()), abs=1e-6)
    assert row["digest"] is not None


def test_the_gradient_of_a_sum_is_one_number_in_memory(path: str) -> None:
    model = nn.Identity()
    with th.record(model, on_error="raise") as rec:
        model(torch.ones(300, 70, requires_grad=True)).sum().backward()
    gradient = next(row for row in rec.table("values").to_pylist() if row["kind"] == "grad_output")
    expected = describe(np.ones((300, 70), np.float32))
    assert (gradient["numel"], gradient["mean"], gradient["digest"]) == (21000, 1.0, expected["digest"])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_ragged_sizes_are_told_as_such(layout: torch.layout) -> None:
    row = row_of(torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout))
    assert row["shape"] == ([2, -1, -1] if layout is torch.strided else [2, -1, 4])


def test_memory_that_is_freed_during_the_run(path: str) -> None:
    """No row keeps a tensor alive, and none reads it once it is gone, or has been written over."""
    freed: list[bool] = []

    class Freeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x * 2
            seen = weakref.ref(out.untyped_storage())
            kept.append(seen)
            return out

    kept: list[Any] = []
    model = nn.Sequential(Freeing(), Freeing())
    with th.record(model, kinds=["output"], on_error="raise") as rec:
        for step in range(20):
            out = model(torch.full((100_000,), float(step)))
            out.fill_(-1)
            out.untyped_storage().resize_(0)
            del out
            gc.collect()
            torch.full((100_000,), 1e9)
            freed.append(all(ref() is None for ref in kept))
    assert all(freed)
    rows = rec.table("values").to_pylist()
    assert [row["mean"] for row in rows if row["path"] == "0"] == [2.0 * step for step in range(20)]
    assert [row["mean"] for row in rows if row["path"] == "1"] == [4.0 * step for step in range(20)]


def test_a_tensor_whose_storage_is_gone(path: str) -> None:
    for tensor in (torch.ones(1000), torch.ones(1000)[300:], torch.ones(1000)[::3]):
        tensor.untyped_storage().resize_(0)
        row = row_of(tensor)
        assert (row["numel"], row["digest"], row["note"]) == (None, None, "Tensor: no storage of its own")


@pytest.mark.parametrize("numel", [2000, 20_000, 50_000_000])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[numel_of(t) // 2 :], lambda t: t.view(2, -1).t()])
def test_a_storage_that_was_made_smaller_is_not_read_past_its_end(
    numel: int, view: Callable[[Tensor], Tensor], path: str
) -> None:
    whole = torch.ones(numel)
    tensor = view(whole)
    whole.untyped_storage().resize_(4096)
    row = row_of(tensor)
    assert (row["mean"], row["note"]) == (None, "Tensor: its storage has been made smaller than it is")


@pytest.mark.parametrize("numel", [1025, 8000])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:], lambda t: t[5:5], lambda t: t[:1000], lambda t: t[::2]])
def test_what_is_left_of_a_storage_is_measured(
    monkeypatch: pytest.MonkeyPatch, numel: int, view: Callable[[Tensor], Tensor]
) -> None:
    """Also where libtorch's own functions cannot be asked."""
    whole = torch.ones(numel)
    tensor = view(whole)
    whole.untyped_storage().resize_(4096)
    rows = [row_of(tensor)]
    monkeypatch.setattr("tenterhook.backends._torch_native.storage_access", lambda: None)
    rows.append(row_of(tensor))
    monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)
    rows.append(row_of(tensor))
    for row in rows:
        del row["path"], row["seq"], row["call_seq"]
    assert rows[0] == rows[1] == rows[2]
    assert (rows[0]["numel"] is None) == (numel_of(tensor) > 0 and end_of(tensor) > 1024)


def test_how_storages_are_asked_does_not_depend_on_what_is_on() -> None:
    expected = storage_access()
    assert expected is not None
    storage_access.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch._subclasses.FakeTensorMode(), torch.inference_mode():
            assert storage_access() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def end_of(tensor: Tensor) -> int:
    return (
        tensor.storage_offset()
        + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
    )


def numel_of(tensor: Tensor) -> int:
    return tensor.numel()


def test_more_elements_than_32_bits_can_count() -> None:
    numel = 2**31 + 77
    row = row_of(torch.full((1,), 2.5, dtype=torch.bfloat16).expand(numel))
    assert [row[name] for name in STATISTICS] == [numel, 2.5, 2.5, 2.5, 0.0, 2.5, 2.5, 0, 0, 0, 0]
    part = np.broadcast_to(np.array(2.5, ml_dtypes.bfloat16), (2**24,))
    starts = range(0, numel, part.size)
    whole = merge([describe(part[: numel - start], start) for start in starts])
    np.testing.assert_allclose(row["sketch"], whole["sketch"], rtol=1e-6, atol=1e-6 * 2.5 * numel / 64)


def test_a_tensor_that_another_thread_writes_to_meanwhile(path: str) -> None:
    """What is written down is of no moment, but it is whole: nothing fails and nothing is read past the end."""
    tensors = [torch.ones(300_001), torch.ones(700, 500).t(), torch.ones(300_001, dtype=torch.float64)]
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for tensor in tensors:
                for value in (torch.nan, 1e30, -torch.inf, 3.0):
                    tensor.fill_(value)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            for tensor in tensors:
                row = row_of_changing(tensor)
                assert row["note"] is None
                assert row["numel"] == tensor.numel()
                counts = [row[name] for name in STATISTICS if name.endswith("_count")]
                assert all(0 <= count <= tensor.numel() for count in counts)
    finally:
        over.set()
        thread.join()


def row_of_changing(tensor: Tensor) -> dict[str, Any]:
    model = Give(tensor)
    with th.record(model, kinds=["output"], on_error="raise") as rec:
        model(None)
    (row,) = rec.table("values").to_pylist()
    return row
