"""The dtypes of NumPy and ml_dtypes that the installed torch has, too: 2.6 lacks ``float8_e8m0fnu``."""

from __future__ import annotations

import torch

from tenterhook.stats.layout import DTYPES

OF_TORCH = tuple(dtype for dtype in DTYPES if hasattr(torch, dtype.name))
