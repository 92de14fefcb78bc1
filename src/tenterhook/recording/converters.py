"""How arrays become a framework's tensors and back, without knowing any framework.

Each backend registers one `Converter`, or the name under which it can be found, so that nothing is imported before it
is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from tenterhook.errors import MissingExtraError, NotRecordedError

__all__ = ["Converter", "converter", "from_numpy", "register", "to_numpy"]


@dataclass(frozen=True)
class Converter:
    """The bridge between NumPy and one framework.

    Attributes:
        owns: whether an object is a tensor of this framework.
        to_numpy: tensor -> array on the host (bf16 and fp8 through ml_dtypes).
        from_numpy: array -> tensor on the host.
    """

    owns: Callable[[Any], bool]
    to_numpy: Callable[[Any], np.ndarray]
    from_numpy: Callable[[np.ndarray], Any]


_converters: dict[str, Converter | str] = {}


def register(framework: str, bridge: Converter | str) -> None:
    """Make a framework known.

    Args:
        framework: its name: `torch`, `mindspore`.
        bridge: the converter, or `"package.module:NAME"` of one, imported on first use.
    """
    _converters[framework] = bridge


def converter(framework: str) -> Converter:
    """Give the converter of a framework, importing it if need be.

    Raises:
        MissingExtraError: nobody registered it, or the framework is not installed.
    """
    bridge = _converters.get(framework)
    if bridge is None:
        known = ", ".join(sorted(_converters)) or "none"
        raise MissingExtraError(f"no converter to {framework} is registered (known: {known}); import its backend first")
    if isinstance(bridge, str):
        module, _, name = bridge.partition(":")
        try:
            bridge = getattr(import_module(module), name)
        except ImportError as error:
            raise MissingExtraError(
                f"{framework} is not installed here, so there is no tensor of it to make; use .as_numpy(), or: "
                f"pip install 'tenterhook[{framework}]'"
            ) from error
        _converters[framework] = bridge
    assert isinstance(bridge, Converter)
    return bridge


def to_numpy(tensor: Any) -> np.ndarray:
    """Give a stored tensor as an array on the host; an array is given as it is.

    Raises:
        NotRecordedError: it is of no framework that is known here.
    """
    if isinstance(tensor, np.ndarray | np.generic):
        return np.asarray(tensor)
    for framework in list(_converters):
        # A framework that nobody imported cannot have made this tensor.
        if framework in sys.modules and (bridge := converter(framework)).owns(tensor):
            return bridge.to_numpy(tensor)
    if hasattr(tensor, "__array__"):
        return np.asarray(tensor)
    raise NotRecordedError(f"a {type(tensor).__name__} cannot be given as a NumPy array: no backend here knows it")


def from_numpy(array: np.ndarray, framework: str) -> Any:
    """Give an array as a tensor of `framework`.

    Raises:
        MissingExtraError: as `converter`.
    """
    return converter(framework).from_numpy(array)
