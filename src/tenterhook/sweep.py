"""Causal tracing: which activation, at which position, carries what makes two runs differ. ``th.patch_sweep``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from tenterhook.backends import Backend, find_backend
from tenterhook.edit_values import is_recording
from tenterhook.editor import edit
from tenterhook.errors import EditError, NotRecordedError, TenterhookError
from tenterhook.heat_map import svg_map, text_map
from tenterhook.recording import converters
from tenterhook.recording.value import Value
from tenterhook.selection import Entry, Selection, resolve
from tenterhook.values import leaves, rebuild

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

__all__ = ["PatchSweep", "patch_sweep"]


@dataclass(frozen=True, eq=False)
class PatchSweep:
    """What the metric became where one position of one module's output was taken from the other run.

    Attributes:
        paths: the modules, in the model's order.
        values: the metric, float64, shape (modules, positions); NaN where a module has no such position.
        corrupt: the metric of the run that was patched, as it is.
        clean: the metric of the run that the patches come from, None where the recording does not hold the model's output.
        approximate: whether the values are first-order estimates (attribution patching).
    """

    paths: list[str]
    values: np.ndarray
    corrupt: float
    clean: float | None = None
    approximate: bool = False

    @property
    def restored(self) -> np.ndarray:
        """The part of the way from the corrupt metric to the clean one, shape (modules, positions): 0 nothing, 1 all of it."""
        if self.clean is None or self.clean == self.corrupt:
            raise TenterhookError(
                "the metric of the clean run is not known, or is that of the corrupt one\n"
                "  record the root, too: th.record(model, tensors=True); .values holds the metric itself"
            )
        return (self.values - self.corrupt) / (self.clean - self.corrupt)

    def table(self) -> pa.Table:
        """Return the columns path, position and value, one row for each pair that there is."""
        rows = [
            {"path": path, "position": position, "value": float(value)}
            for path, line in zip(self.paths, self.values, strict=True)
            for position, value in enumerate(line)
            if not np.isnan(value)
        ]
        return pa.Table.from_pylist(
            rows, pa.schema([("path", pa.string()), ("position", pa.int32()), ("value", pa.float64())])
        )

    def best(self) -> tuple[str, int]:
        """Return the module and the position that move the metric most."""
        row, position = np.unravel_index(np.nanargmax(np.abs(self.values - self.corrupt)), self.values.shape)
        return self.paths[int(row)], int(position)

    def _shades(self) -> np.ndarray:
        """The part of the way that each patch makes; where its end is not known, of the longest that one makes."""
        if self.clean is not None and self.clean != self.corrupt:
            return self.restored
        moved = np.abs(self.values - self.corrupt)
        return moved / (float(np.nanmax(moved)) or 1.0)

    def _title(self) -> str:
        clean = "" if self.clean is None else f", clean {self.clean:.4g}"
        return f"{'estimated by gradient; ' if self.approximate else ''}metric: corrupt {self.corrupt:.4g}{clean}"

    def __str__(self) -> str:
        """Draw a heat map: modules down, positions across, the darker the more of the metric comes back."""
        shades, notes = self._shades(), []
        for line, values in zip(np.nan_to_num(shades), self.values, strict=True):
            place = int(np.argmax(np.abs(line)))
            known = self.clean is not None and self.clean != self.corrupt
            notes.append(f"{line[place]:.0%} at {place}" if known else f"{values[place]:.4g} at {place}")
        return "\n".join([*text_map([path or "(root)" for path in self.paths], shades, notes), self._title()])

    def svg(self) -> str:
        """Draw the heat map as SVG: blue where the metric comes back, red where it goes further away."""
        return svg_map([path or "(root)" for path in self.paths], self._shades(), self.values, title=self._title())

    def _repr_svg_(self) -> str:
        return self.svg()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from str(self).splitlines()


def patch_sweep(
    model: Any,
    inputs: Any,
    clean: Any,
    corrupt: Any,
    select: Selection,
    metric: Callable[[Any], Any],
    *,
    dim: int = 1,
    approximate: bool = False,
    batch: int = 1,
) -> PatchSweep:
    """Patch every position of every selected module's output from a clean run into a corrupt one, one at a time.

    ```python
    with th.record(model, tensors=True) as clean:
        model(clean_tokens)
    sweep = th.patch_sweep(model, corrupt_tokens, clean, None, "blocks.*", lambda logits: logits[0, -1, answer])
    print(sweep)
    ```

    The model is called once for each pair of module and position (or ``batch`` of them at a time); it should be in evaluation
    mode. A progress bar is shown on a terminal.

    Args:
        model: a torch ``Module`` or MindSpore ``Cell``; each selected module is called once in a run and returns one tensor.
        inputs: of the corrupt run: a tensor, or a tuple of arguments.
        clean: a recording of the clean run, made with ``tensors=True``, of inputs of the same shape.
        corrupt: a recording of the corrupt run, whose stored output gives its metric; None runs the model once more for that.
            Or edits of outputs that make the corrupt run, the same in each: the usual causal tracing has the same inputs,
            and noise on those of the embedding, ``{"embed": th.edits.noise(3.0, dim=1, index=[2, 3])}``.
        select: which modules.
        metric: a scalar of the model's output.
        dim: the dimension of the positions.
        approximate: estimate all by one forward and one backward pass, as the gradient of the metric times the difference of
            the activations (attribution patching): cheap, and right as far as the model is linear between the two.
        batch: how many patched copies of the inputs go into one call; only for models that treat the elements of a
            batch (dim 0) by themselves, which is tried first.

    Raises:
        TenterhookError: with ``batch``, the metric of copies that run together is not that of one alone; or it is less than 1.
        SelectionError: nothing matches.
        NotRecordedError: the recording does not hold an output that is to be patched.
        EditError: the clean activations have another shape, or no such ``dim``; or ``clean`` or ``corrupt`` is no recording
            made with ``tensors=True``.
    """
    backend = find_backend(model)
    chosen = resolve(select, backend.entries(model), require_callable=True)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    recorded = getattr(clean, "recording", clean)
    by_edits = isinstance(corrupt, Mapping)
    run = _Run(backend, model, arguments, metric, dim, corrupt if by_edits else {})
    _check_recording("clean", recorded)
    if corrupt is not None and not by_edits:
        _check_recording("corrupt", getattr(corrupt, "recording", corrupt))
    patches = {entry.path: _stored(recorded, entry.path) for entry in chosen}
    base = None if corrupt is None or by_edits else _metric_of(backend, getattr(corrupt, "recording", corrupt), metric)
    base = run.patched({}) if base is None else base
    known = _metric_of(backend, recorded, metric)
    values = np.full((len(chosen), _most_positions(patches, dim)), np.nan)
    fill = _estimate(run, chosen, patches, base) if approximate else _sweep(run, chosen, patches, batch, base)
    for row, position, value in fill:
        values[row, position] = value
    return PatchSweep([entry.path for entry in chosen], values, base, known, approximate)


def _check_recording(name: str, given: Any) -> None:
    if not is_recording(given):
        raise EditError(
            f"patch_sweep: {name} is a {type(given).__name__}, not a recording made with tensors=True\n"
            f"  with th.record(model, tensors=True) as {name}: model({name}_inputs)"
        )


def _stored(recorded: Any, path: str) -> np.ndarray:
    output = recorded[path].output
    try:
        return converters.to_numpy(output)
    except NotRecordedError:
        what = "no tensor" if isinstance(output, Value) else f"a {type(output).__name__}, not one tensor,"
        raise EditError(
            f"patch_sweep: clean holds {what} for the output of {path or '(root)'}; it must be a recording made with "
            f"tensors=True\n  with th.record(model, tensors=True) as clean: model(clean_inputs)"
        ) from None


class _Run:
    """The corrupt run, as often as it takes."""

    def __init__(
        self,
        backend: Backend,
        model: Any,
        arguments: tuple[Any, ...],
        metric: Callable[[Any], Any],
        dim: int,
        corruption: Mapping[Any, Any],
    ) -> None:
        self.backend = backend
        self.model = model
        self.arguments = arguments
        self.metric = metric
        self.dim = dim
        self.corruption = corruption
        self.modules = {
            entry.path: entry.module for entry in backend.entries(model)
        }  # paths may hold signs of a pattern

    def patched(self, edits: dict[str, Any]) -> float:
        """Return the metric with some outputs edited."""
        return self.several(edits, 1)[0]

    def several(self, edits: dict[str, Any], copies: int) -> list[float]:
        """Return the metric of each of several copies of the inputs that run in one batch."""
        with self.backend.untracked():
            return self._several(edits, copies)

    def _several(self, edits: dict[str, Any], copies: int) -> list[float]:
        backend, types = self.backend, self.backend.tensor_types
        with self.edited(edits):
            if copies == 1:
                return [_number(backend, self.metric(self.model(*self.arguments)))]
            output = self.model(*[_repeated(backend, one, copies) for one in self.arguments])
            found = leaves(output, types)
            size = len(leaves(self.arguments, types)[0][1])
            return [
                _number(
                    backend,
                    self.metric(
                        rebuild(output, {slot: one[number * size : (number + 1) * size] for slot, one in found})
                    ),
                )
                for number in range(copies)
            ]

    @contextlib.contextmanager
    def edited(self, edits: Mapping[str, Any]) -> Iterator[None]:
        """Make the run a corrupt one, and edit outputs in it."""
        with edit(self.model) as editor:
            for select, value in self.corruption.items():
                editor.output(select, value)
            for path, value in edits.items():
                editor.output(self.modules[path], value)
            yield

    def patch(self, patch: np.ndarray, positions: Sequence[int], value: Any) -> Any:
        """Return a value whose n-th copy has the n-th of these positions from the patch."""
        size, copies = len(patch), len(positions)
        if tuple(value.shape) != (size * copies, *patch.shape[1:]):
            raise EditError(
                f"patch_sweep: the clean activations have shape {patch.shape}, those of the corrupt run {tuple(value.shape)}\n"
                "  record a clean run with inputs of the same shape"
            )
        mask = np.zeros((size * copies, *patch.shape[1:]), bool)
        for number, position in enumerate(positions):
            part = np.moveaxis(mask[number * size : (number + 1) * size], self.dim, 0)
            part[position] = True
        whole = self.backend.constant(np.concatenate([patch] * copies), value)
        return self.backend.where(self.backend.constant(mask, value, boolean=True), whole, value)


def _most_positions(patches: Mapping[str, np.ndarray], dim: int) -> int:
    for path, patch in patches.items():
        if not -patch.ndim <= dim < patch.ndim:
            raise EditError(
                f"patch_sweep: the output of '{path or '(root)'}' has shape {patch.shape}, and so no dim {dim}\n"
                "  say along which dimension the positions are: dim="
            )
    return max(patch.shape[dim] for patch in patches.values())


def _sweep(
    run: _Run, chosen: list[Entry], patches: dict[str, np.ndarray], batch: int, corrupt: float
) -> Iterator[tuple[int, int, float]]:
    if batch < 1:
        raise TenterhookError(
            f"patch_sweep: batch={batch} runs nothing\n  give how many copies go into one call, 1 or more"
        )
    if batch > 1:
        _check_batch(run, corrupt)
    total = sum(patch.shape[run.dim] for patch in patches.values())
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter
    with Progress(console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("patching", total=total)
        for row, entry in enumerate(chosen):
            patch = patches[entry.path]
            places = list(range(patch.shape[run.dim]))
            for start in range(0, len(places), batch):
                positions = places[start : start + batch]
                values = run.several({entry.path: partial(run.patch, patch, positions)}, len(positions))
                yield from ((row, position, value) for position, value in zip(positions, values, strict=True))
                progress.advance(task, len(positions))


def _check_batch(run: _Run, alone: float) -> None:
    together = run.several({}, 2)
    if not np.allclose(together, alone, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise TenterhookError(
            f"patch_sweep: of two copies in one batch the metric is {', '.join(f'{one:.6g}' for one in together)}, of one alone "
            f"{alone:.6g}\n  the model mixes the elements of a batch, or draws at random: put it into evaluation mode, or leave out batch="
        )


def _estimate(
    run: _Run, chosen: list[Entry], patches: dict[str, np.ndarray], corrupt: float
) -> Iterator[tuple[int, int, float]]:
    backend, model, paths = run.backend, run.model, [entry.path for entry in chosen]
    seen: dict[str, Any] = {}
    with backend.untracked(), run.edited({path: partial(seen.setdefault, path) for path in paths}):
        model(*run.arguments)
    here = {path: backend.to_numpy(backend.keep(value)) for path, value in seen.items()}
    nothing = [backend.constant(np.zeros(here[path].shape), seen[path]) for path in paths]

    def shifted(by: Sequence[Any]) -> Any:
        with run.edited({path: partial(_add, shift) for path, shift in zip(paths, by, strict=True)}):
            return run.metric(model(*run.arguments))

    for row, (path, gradient) in enumerate(zip(paths, backend.gradients(shifted, nothing), strict=True)):
        product = (patches[path] - here[path]).astype(np.float64) * converters.to_numpy(gradient)
        others = tuple(axis for axis in range(product.ndim) if axis != run.dim % product.ndim)
        yield from ((row, position, corrupt + value) for position, value in enumerate(product.sum(others)))


def _add(shift: Any, value: Any) -> Any:
    return value + shift


def _repeated(backend: Backend, value: Any, copies: int) -> Any:
    parts = {
        slot: backend.constant(np.concatenate([converters.to_numpy(backend.keep(one))] * copies), one)
        for slot, one in leaves(value, backend.tensor_types)
    }
    return rebuild(value, parts)


def _number(backend: Backend, value: Any) -> float:
    if isinstance(value, backend.tensor_types):
        value = backend.to_numpy(backend.keep(value))
        if value.size != 1:
            raise TenterhookError(
                f"patch_sweep: the metric has shape {value.shape}\n  return a single number, as by .mean()"
            )
        return float(value.reshape(()))
    return float(value)


def _metric_of(backend: Backend, recorded: Any, metric: Callable[[Any], Any]) -> float | None:
    if "" not in recorded or not recorded[""].calls:
        return None
    output = recorded[""].output
    if isinstance(output, np.ndarray):
        output = converters.from_numpy(output, backend.name)
    return _number(backend, metric(output)) if isinstance(output, backend.tensor_types) else None
