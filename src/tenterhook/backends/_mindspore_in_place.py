"""Operations in place that change nothing: on some devices MindSpore gives a new tensor and leaves the old one as it is.

It says nothing of that, so we do: where the code of a cell or of a callback uses such an operation, and where an optimizer
of ``mint.optim``, which consist of them, has left its parameters alone. Whether an operation works is tried, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import mindspore
import numpy as np
from mindspore import context, nn
from mindspore.graph.api import _no_grad

from tenterhook.backends._mindspore_watching import tell_once

__all__ = ["Stepped", "tell_of_cells", "tell_of_code"]


def tell_of_cells(cells: Iterable[nn.Cell]) -> None:
    """Say which cells use operations in place that change nothing here."""
    for kind in dict.fromkeys(type(cell) for cell in cells):
        if not kind.__module__.startswith("mindspore."):
            tell_of_code(kind.construct, f"{kind.__name__}.construct")


def tell_of_code(function: Any, name: str) -> None:
    """Say which operations in place that change nothing here a function's own code uses."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None:
        return
    device = str(context.get_context("device_target"))
    for operation in sorted({one for one in _names(code) if one.endswith("_") and not one.startswith("_")}):
        if _does_nothing(operation, device):
            tell_once(
                f"{name} uses {operation}, which changes nothing on {device} in MindSpore {mindspore.__version__}: "
                "it gives a new tensor and leaves the old one as it is"
            )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _does_nothing(operation: str, device: str) -> bool:
    """Try an operation on a tensor of one element."""
    for arguments in ((), (3.0,)):
        tensor = mindspore.Tensor(np.float32([2.0]))
        method: Callable[..., Any] | None = getattr(tensor, operation, None)
        if not callable(method):
            return False
        try:
            with _no_grad():
                given = method(*arguments)
            return bool(tensor.asnumpy()[0] == 2.0 != given.asnumpy()[0])
        except Exception:  # it takes other arguments, or has no kernel here, which it says by itself: we only ask
            continue
    return False


class Stepped:
    """Looks at what a step of an optimizer of ``mint.optim`` does to its smallest parameter with a gradient."""

    def __init__(self, optimizer: Any, gradients: Any) -> None:
        self._name = f"mint.optim.{type(optimizer).__name__}"
        self._parameter: Any = None
        if type(optimizer).__module__.startswith("mindspore.mint.optim") and isinstance(gradients, (tuple, list)):
            pairs = [
                (parameter, gradient)
                for parameter, gradient in zip(optimizer.parameters, gradients, strict=False)
                if isinstance(gradient, mindspore.Tensor)
            ]
            for parameter, gradient in sorted(pairs, key=lambda pair: pair[0].size):
                if np.any(gradient.asnumpy()):
                    self._parameter, self._before = parameter, parameter.asnumpy().copy()
                    break

    def tell(self) -> None:
        """Say so if it has done nothing."""
        if self._parameter is not None and np.array_equal(self._parameter.asnumpy(), self._before):
            device = context.get_context("device_target")
            tell_once(
                f"{self._name} has left the parameters as they were: operations in place change nothing on {device} in "
                f"MindSpore {mindspore.__version__}; use mindspore.nn or mindspore.experimental.optim"
            )
