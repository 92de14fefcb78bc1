"""How each framework builds the nets of the contract and runs them; one file for each, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec

from tests.contract.adapters.base import Adapter

__all__ = ["adapter_names", "load_adapter"]


def adapter_names() -> list[str]:
    """Return the names of all adapters, whether or not their frameworks are installed."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def load_adapter(name: str) -> Adapter | str:
    """Return the adapter, or the name of the package that it needs and that is not installed."""
    module = importlib.import_module(f"{__name__}.{name}") if _installed(name) else None
    return name if module is None else module.ADAPTER


def _installed(name: str) -> bool:
    # an adapter is named for the package that it needs; one that needs none says so by an underscore: toy_
    return name.endswith("_") or find_spec(name) is not None
