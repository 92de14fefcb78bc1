"""Hooks on neural networks, in PyTorch and MindSpore: see, change, compare and diagnose what happens inside.

Importing this package imports no framework and changes nothing.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
