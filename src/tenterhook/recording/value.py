"""One tensor that was seen, and nested values of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np

from tenterhook._slots import split_slot
from tenterhook.address import Address, Kind, split_op
from tenterhook.errors import AmbiguousError, NotRecordedError
from tenterhook.recording import converters
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.refused import NOT_KEPT
from tenterhook.stats import STATISTICS

__all__ = ["STALE", "Nested", "TensorSource", "Value", "gather", "tokens", "value_from_row"]

STALE = "changed in place after it was seen, and alias=True made no copy"

_COUNTS = (("nan_count", "NaN"), ("posinf_count", "+Inf"), ("neginf_count", "-Inf"))


class TensorSource(Protocol):
    """Where tensors come from."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the recording."""
        ...

    def has_tensor(self, key: str, rank: int) -> bool:
        """Say whether a tensor is stored."""
        ...

    def tensor(self, key: str, rank: int, *, own: bool = True) -> Any:
        """Give a stored tensor; not `own`, it is only to be looked at."""
        ...


@dataclass(frozen=True, repr=False)
class Value:
    """What is known of one tensor at the moment it was seen.

    Attributes:
        seq: number of the event, per rank.
        step: the step.
        rank: the process.
        model: name of the outermost module.
        path: path of the module.
        kind: `input`, `output`, `grad_input`, `grad_output`, `param`, `param_grad` or `update`.
        slot: place in a nested value; `""` for a bare tensor, a parameter's name for inputs and params.
        call: number of the module's call in its step.
        phase: `forward`, `backward` or `recompute`.
        pass_: number of the backward pass through the same call.
        shape: its shape; of a tensor that is spread over ranks, the whole's.
        shard: of such a tensor, index in the whole of the first element that this rank holds; None for a whole tensor.
        dtype: `float32`, `bfloat16`, ...; `none` where no tensor came.
        device: where it was.
        statistics: the basic statistics by name; None where they make no sense.
        sketch: float32, shape (64,); None when not taken.
        digest: 64-bit digest of the bytes.
        note: why something is missing.
        key: its key in the tensor store; None when it was not stored.

    Each statistic is an attribute too: `value.mean`, `value.nan_count`.
    """

    seq: int
    call_seq: int | None
    step: int
    rank: int
    model: str | None
    path: str | None
    kind: str
    slot: str
    call: int | None
    phase: str | None
    pass_: int | None
    shape: tuple[int, ...] | None
    shard: tuple[int, ...] | None
    dtype: str | None
    device: str | None
    statistics: dict[str, float | int | None]
    sketch: np.ndarray | None
    digest: int | None
    note: str | None
    key: str | None
    store: TensorSource = field(compare=False)

    def __getattr__(self, name: str) -> Any:
        if name in STATISTICS:
            return self.statistics[name]
        if name in self.__dataclass_fields__:  # an instance that is being made, as by copy.copy, has none yet
            raise AttributeError(name)
        if "store" not in self.__dict__:
            raise AttributeError(f"a recorded value has no attribute {name!r}")
        raise AttributeError(f"a recorded value has no attribute {name!r}; {self._where_numbers_are()}")

    def _where_numbers_are(self) -> str:
        if self.stored:
            return "the tensor itself is .tensor"
        if self.note and NOT_KEPT in self.note:
            return f"{self.address} was recorded without its tensor ({self.note})"
        return f"{self.address} was recorded without its tensor: record(..., tensors=True) stores tensors"

    def _is_no_tensor(self, *_: object) -> NoReturn:
        """Say where the numbers are to whoever calculates with what is known of them."""
        raise NotRecordedError(f"this is what is known of a tensor and not the tensor; {self._where_numbers_are()}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_tensor
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __floordiv__ = __mod__ = __and__ = __or__ = _is_no_tensor
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __iter__ = __float__ = __int__ = _is_no_tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Give the tensor to NumPy, where it was stored.

        Raises:
            NotRecordedError: it was not.
        """
        array = self.as_numpy()
        return array.copy() if copy else array if dtype is None else array.astype(dtype, copy=False)

    @property
    def stored(self) -> bool:
        """Whether the tensor itself is in the recording."""
        return self.key is not None and self.store.has_tensor(self.key, self.rank)

    @property
    def stale(self) -> bool:
        """Whether the tensor was stored without a copy (``alias=True``) and has been changed in place since."""
        is_stale = getattr(self.store, "is_stale", None)  # only what is in memory can be
        return self.key is not None and is_stale is not None and is_stale(self.key)

    @property
    def tensor(self) -> Any:
        """The tensor: the framework's own in a live recording, a NumPy array in an opened one.

        Raises:
            NotRecordedError: only its statistics were recorded, or it was changed in place after it was stored by
                ``alias=True``.
        """
        if self.stale:
            raise NotRecordedError(f"the tensor of {self.address} was {STALE}; record(..., tensors=True) copies")
        if self.key is not None and not self.stored:
            stopped = self.store.manifest.tensors_stopped or "the recording was cut off before it was written"
            raise NotRecordedError(f"the tensor of {self.address} was not stored: {stopped}")
        if self.key is None:
            if self.note and NOT_KEPT in self.note:
                raise NotRecordedError(f"{self.address} was recorded without its tensor ({self.note})")
            why = f" ({self.note})" if self.note else ""
            raise NotRecordedError(
                f"{self.address} was recorded without its tensor{why}; record(..., tensors=True) stores tensors"
            )
        return self.store.tensor(self.key, self.rank)

    def as_numpy(self) -> np.ndarray:
        """Give the tensor as a NumPy array on the host, bf16 and fp8 through ml_dtypes."""
        return converters.to_numpy(self.tensor)

    def as_torch(self) -> Any:
        """Give the tensor as a torch tensor on the host.

        Raises:
            MissingExtraError: torch is not installed.
        """
        return converters.from_numpy(self.as_numpy(), "torch")

    @property
    def address(self) -> str:
        """`path:kind slot#call@step`."""
        path, op = split_op(self.path or "")
        try:
            return str(Address(path, Kind(self.kind), self.slot, op=op, call=self.call, step=self.step))
        except ValueError:  # a damaged or newer recording; what stands there is the best that can be said
            return f"{self.path or '(root)'}:{self.kind}{self.slot}#{self.call}@{self.step}"

    def __repr__(self) -> str:
        rank = f" of rank {self.rank}" if "store" in self.__dict__ and self.store.manifest.world > 1 else ""
        parts = [f"{self.address}{rank}", self.dtype or "?"]
        if self.shape is not None:
            parts.append("(" + ", ".join(map(str, self.shape)) + ")")
        statistics = self.statistics
        if statistics.get("min") is not None:
            parts.append(f"x∈[{statistics['min']:.4g}, {statistics['max']:.4g}]")
        if statistics.get("mean") is not None and statistics.get("std") is not None:
            parts.append(f"μ={statistics['mean']:.4g} σ={statistics['std']:.4g}")
        parts += [f"{statistics[name]} {word}!" for name, word in _COUNTS if statistics.get(name)]
        if self.device and self.device != "cpu":
            parts.append(self.device)
        if self.note:
            parts.append(f"({self.note})")
        if self.stale:
            parts.append("(stale)")
        return " ".join(parts)


def value_from_row(row: dict[str, Any], store: TensorSource) -> Value:
    """Make a value of a row of the table `values`."""
    return Value(
        seq=row["seq"],
        call_seq=row["call_seq"],
        step=row["step"],
        rank=row["rank"],
        model=row["model"],
        path=row["path"],
        kind=row["kind"],
        slot=row["slot"] or "",
        call=row["call"],
        phase=row["phase"],
        pass_=row["pass"],
        shape=None if row["shape"] is None else tuple(row["shape"]),
        shard=None if row["shard"] is None else tuple(row["shard"]),
        dtype=row["dtype"],
        device=row["device"],
        statistics={name: row[name] for name in STATISTICS},
        sketch=None if row["sketch"] is None else np.asarray(row["sketch"], np.float32),
        digest=row["digest"],
        note=row["note"],
        key=row["tensor"],
        store=store,
    )


class Nested(Mapping[str, Any]):
    """The tensors of a nested value, by slot.

    `nested['["logits"]']` takes the slot as it is written; `nested["logits"]`, `nested[0]` and `nested.hidden_states`
    go down one level. Where a tensor was stored, that is what is given; where not, its `Value`. Of what holds a single tensor, as
    the input of most modules does, `nested.only()` gives that.
    """

    def __init__(self, leaves: Sequence[tuple[tuple[str | int, ...], Value]], what: str) -> None:
        self._leaves = list(leaves)
        self._what = what

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            for _, value in self._leaves:
                if value.slot == key:
                    return _given(value)
        below = [(tokens[1:], value) for tokens, value in self._leaves if tokens and tokens[0] == key]
        if not below:
            slots = ", ".join(repr(slot) for slot in self) or "none"
            single = "; .only() gives its one tensor" if len(self) == 1 else ""
            raise NotRecordedError(f"{self._what} has no slot {key!r}; its slots are {slots}{single}")
        return (
            _given(below[0][1]) if len(below) == 1 and not below[0][0] else Nested(below, f"{self._what}{_step(key)}")
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except NotRecordedError as error:
            raise AttributeError(str(error)) from None

    def only(self) -> Any:
        """Give the only tensor in it: `recording["fc"].input.only()`.

        Raises:
            AmbiguousError: it holds several.
        """
        if len(self) > 1:
            raise AmbiguousError(f"{self._what} holds {len(self)} tensors; choose one: {', '.join(map(repr, self))}")
        return _given(self._leaves[0][1])

    def __iter__(self) -> Iterator[str]:
        return (value.slot for _, value in self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        lines = "".join(f"\n  {value!r}" for _, value in self._leaves)
        return f"{self._what}: {len(self)} tensor{'' if len(self) == 1 else 's'}{lines}"


def _step(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f".{key}" if key.isidentifier() else f'["{key}"]'


def tokens(slot: str) -> tuple[str | int, ...]:
    """Split a slot into its steps: `["logits"][0]` into `logits` and 0."""
    return tuple(_token(step) for step in split_slot(slot))


def _token(step: str) -> str | int:
    if step[0] != "[":
        return step.removeprefix(".")
    inner = step[1:-1]
    return json.loads(inner) if inner[0] == '"' else inner if inner[0] == "?" else int(inner)


def _given(value: Value) -> Any:
    if value.dtype == "none":
        return None  # a gradient that never came, which is not zero
    return value.tensor if value.stored else value


def gather(values: Sequence[Value], what: str) -> Any:
    """Give the values of one kind of one call as what they were: a bare tensor, or a nested value.

    Args:
        values: at least one.
        what: the address, for messages.
    """
    if len(values) == 1 and values[0].slot == "":
        return _given(values[0])
    return Nested([(tokens(value.slot), value) for value in values], what)
