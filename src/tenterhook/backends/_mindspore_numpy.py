"""A word on NumPy 2, for which MindSpore's binaries are not built."""

from __future__ import annotations

import warnings

import numpy

__all__ = ["warn_about_numpy"]

_warned: set[str] = set()


def warn_about_numpy(stacklevel: int = 2) -> None:
    """Warn, once in a process, where NumPy is too new for MindSpore.

    Args:
        stacklevel: of the code that is warned: 1 our caller, 2 the caller of that.
    """
    if int(numpy.__version__.partition(".")[0]) < 2 or "numpy" in _warned:
        return
    _warned.add("numpy")
    warnings.warn(
        f"numpy {numpy.__version__} is installed, and MindSpore's binaries are built for numpy 1: the first operation "
        "of the process may end in a SystemError. Cure: pip install 'numpy<2' 'pyarrow<26'",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
