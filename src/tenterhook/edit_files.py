"""Edit values on disk: JSON, with the tensors beside it in safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tenterhook.edit_values import OPERATIONS, EditValue, is_recording
from tenterhook.errors import EditError
from tenterhook.recording import converters
from tenterhook.recording.reader import open_recording

__all__ = ["read", "save"]


def save(edits: EditValue | Sequence[EditValue] | Mapping[str, EditValue], path: str | os.PathLike[str]) -> None:
    """Write edit values as JSON, with their tensors in a file of the same name that ends in ``.safetensors``.

    An edit that draws from a recording keeps its path, which must be on disk (``rec.save(path)``).

    Raises:
        EditError: a recording is in memory only, or something is no edit value.
    """
    _check(edits)
    tensors: dict[str, np.ndarray] = {}
    if isinstance(edits, EditValue):
        data: Any = _to_json(edits, tensors)
    elif isinstance(edits, Mapping):
        data = {"edits": {name: _to_json(one, tensors) for name, one in edits.items()}}
    else:
        data = {"edits": [_to_json(one, tensors) for one in edits]}
    target = Path(path)
    target.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    if tensors:
        save_file(tensors, target.with_suffix(".safetensors"))


def _check(edits: Any) -> None:
    if isinstance(edits, EditValue):
        return
    if isinstance(edits, Mapping):
        named = [(f"{name!r} is", one) for name, one in edits.items()]
    elif isinstance(edits, Sequence) and not isinstance(edits, (str, bytes)):
        named = [(f"number {place} is", one) for place, one in enumerate(edits)]
    else:
        named = [("this is", edits)]
    for which, one in named:
        if not isinstance(one, EditValue):
            raise EditError(
                f"th.edits.save writes values of th.edits only, and {which} {type(one).__name__} {one!r}\n"
                "  give what th.edits.scale, th.edits.patch and so on return; a function cannot be saved"
            )


def read(path: str | os.PathLike[str], make: Callable[..., EditValue]) -> Any:
    """Read what :func:`save` has written: one edit value, a list or a dictionary of them.

    Args:
        path: the file.
        make: makes an edit value of its name, ``dim=``, ``index=`` and options, or refuses to.

    Raises:
        EditError: the file is none of ours, or has a value in it that no edit can have.
    """
    source = Path(path)
    beside = source.with_suffix(".safetensors")
    tensors: dict[str, np.ndarray] = {}
    if beside.exists():
        tensors = load_file(beside)
    data = json.loads(source.read_text("utf-8"))
    try:
        edits = data.get("edits")
        if isinstance(edits, dict):
            return {name: _from_json(one, tensors, make) for name, one in edits.items()}
        return _from_json(data, tensors, make) if edits is None else [_from_json(one, tensors, make) for one in edits]
    except EditError as error:
        raise EditError(f"{source} holds an edit that cannot be: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise EditError(f"{source} does not hold edits as th.edits.save writes them: {error!r}") from error


def _to_json(edit: EditValue, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    options = {name: _option_to_json(edit, value, tensors) for name, value in edit.options.items()}
    index = [{"slice": [i.start, i.stop, i.step]} if isinstance(i, slice) else i for i in edit.index]
    return {"edit": edit.name, "options": options, "dim": list(edit.dim), "index": index}


def _option_to_json(edit: EditValue, value: Any, tensors: dict[str, np.ndarray]) -> Any:
    if is_recording(value):
        path = getattr(value, "recording", value).path
        if path is None:
            raise EditError(
                f"{edit!r} draws from a recording in memory\n  rec.save('NAME.thk') first, and use th.open('NAME.thk')"
            )
        return {"recording": str(path)}
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return value
    key = str(len(tensors))
    tensors[key] = np.ascontiguousarray(converters.to_numpy(value))
    return {"tensor": key}


def _from_json(data: Mapping[str, Any], tensors: Mapping[str, np.ndarray], make: Callable[..., EditValue]) -> EditValue:
    name = data["edit"]
    if name not in OPERATIONS:
        raise KeyError(name)
    options = {key: _option_from_json(value, tensors) for key, value in data["options"].items()}
    index = [slice(*i["slice"]) if isinstance(i, dict) else i for i in data["index"]]
    places = {"dim": tuple(data["dim"]), "index": tuple(index)} if data["dim"] else {}
    return make(name, **places, **options)


def _option_from_json(value: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        return tensors[value["tensor"]] if "tensor" in value else open_recording(value["recording"])
    return tuple(value) if isinstance(value, list) else value
