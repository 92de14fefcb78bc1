"""Tensors on disk: every dtype and shape, read back bit for bit, by us and by the safetensors library."""

from __future__ import annotations

from pathlib import Path

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenterhook.errors import NotRecordedError
from tenterhook.recording import DiskSink, Manifest, Pace, Recording, open_recording
from tenterhook.recording.shards import ShardWriter
from tests.recording.synthetic import modules_table

PLAIN = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]
OTHERS = ["complex64", "complex128"]
OF_ML_DTYPES = [
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int4",
    "uint4",
]


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def stored(path: Path, tensors: dict[str, np.ndarray], *, close: bool = True, **options: Pace) -> Recording:
    sink = DiskSink(path, Manifest(), **options)  # type: ignore[arg-type]
    for key, tensor in tensors.items():
        assert sink.write_tensor(key, tensor)
    if close:
        sink.close(Manifest(), modules_table())
    else:
        sink.flush()
    assert sink.failure is None
    return open_recording(path)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("name", PLAIN + OTHERS + OF_ML_DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str, close: bool) -> None:
    kind = dtype(name)
    raw = np.random.default_rng(0).integers(0, 2, 24 * kind.itemsize, np.uint8)
    full = raw.view(kind).reshape(2, 3, 4)
    tensors = {"full": full, "scalar": full[0, 0, 0].reshape(()), "empty": full[:0], "turned": full.transpose(2, 0, 1)}
    recording = stored(tmp_path / "a.thk", tensors, close=close)
    for key, tensor in tensors.items():
        read = recording.tensor(key)
        assert isinstance(read, np.ndarray) and (read.dtype, read.shape) == (kind, tensor.shape)
        assert read.tobytes() == tensor.tobytes()


def test_foreign_byte_order_is_put_right(tmp_path: Path) -> None:
    read = stored(tmp_path / "a.thk", {"t": np.arange(5, dtype=">f4")}).tensor("t")
    assert read.tolist() == [0, 1, 2, 3, 4] and read.dtype == np.float32


def test_objects_are_refused_as_nothing_is_pickled(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    sink.write_tensor("t", np.array([object()]))
    sink.close(manifest, modules_table())
    assert manifest.partial == "writing stopped: ValueError: no dtype of plain numbers is called 'object'"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    recording = stored(tmp_path / "a.thk", {"t": np.ones(2)})
    with pytest.raises(NotRecordedError, match="no tensor 'u'"):
        recording.tensor("u")


def test_the_safetensors_library_reads_our_shards(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        f"t{index}": np.random.default_rng(index).normal(size=(index, 7)).astype(np.float32) for index in range(9)
    }
    tensors["half"] = np.ones((2, 2)).astype(ml_dtypes.bfloat16)
    tensors["wide"] = np.array([1 + 2j])
    tensors["odd"] = np.ones(3, np.uint8)
    tensors["after"] = np.arange(3, dtype=np.int64)
    stored(tmp_path / "a.thk", tensors)
    data = (tmp_path / "a.thk" / "rank-00000" / "tensors-00000.safetensors").read_bytes()
    read = dict(safetensors.deserialize(data))
    assert set(read) == set(tensors)
    for key, tensor in tensors.items():
        assert bytes(read[key]["data"]) == tensor.tobytes()
    assert read["half"]["dtype"] == "BF16" and read["half"]["shape"] == [2, 2]
    assert (read["wide"]["dtype"], read["wide"]["shape"]) == ("U8", [1, 16])


@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
def test_shards_are_of_the_size_that_was_asked_for(tmp_path: Path, close: bool) -> None:
    tensors = {f"t{index}": np.full((50, 50), index, np.float32) for index in range(40)}
    recording = stored(tmp_path / "a.thk", tensors, close=close, pace=Pace(shard_bytes=100_000))
    shards = sorted((tmp_path / "a.thk" / "rank-00000").glob("tensors-*.safetensors*"))
    assert len(shards) > 5 and all(shard.stat().st_size < 180_000 for shard in shards)
    assert all(recording.tensor(key).tobytes() == tensor.tobytes() for key, tensor in tensors.items())


def test_many_small_tensors_make_few_shards(tmp_path: Path) -> None:
    tensors = {f"layers.{index}/output#0@0": np.array(index, np.float32) for index in range(20_000)}
    recording = stored(tmp_path / "a.thk", tensors)
    assert len(list((tmp_path / "a.thk" / "rank-00000").glob("*.safetensors"))) <= 5
    assert [float(recording.tensor(f"layers.{index}/output#0@0")) for index in range(0, 20_000, 1999)] == [
        *range(0, 20_000, 1999)
    ]


def test_a_sequence_maps_and_does_not_load(tmp_path: Path) -> None:
    recording = stored(tmp_path / "a.thk", {"t": np.ones(1_000_000)})
    read = recording.tensor("t")
    base: object = read
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_two_tensors_of_one_key_are_a_fault_of_the_caller(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.append("t", np.ones(2))
    with pytest.raises(ValueError, match="two tensors have the key 't'"):
        writer.append("t", np.ones(2))
    writer.stop()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=30).filter(lambda key: key != "__metadata__"),
        arrays.arrays(
            st.sampled_from([dtype(name) for name in ("float32", "int8", "bool", "float64", "complex128", "uint16")]),
            arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        ),
        max_size=6,
    ),
    shard_bytes=st.sampled_from([1, 100_000]),
)
def test_any_keys_and_shapes_come_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray], shard_bytes: int
) -> None:
    recording = stored(tmp_path_factory.mktemp("t") / "a.thk", tensors, pace=Pace(shard_bytes=shard_bytes))
    for key, tensor in tensors.items():
        read = recording.tensor(key)
        assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())
