"""Every test of the contract runs in every framework that is installed."""

from __future__ import annotations

import warnings

import pytest

from tests.contract.adapters import adapter_names, load_adapter
from tests.contract.adapters.base import Adapter


@pytest.fixture(params=adapter_names(), scope="session")
def fw(request: pytest.FixtureRequest) -> Adapter:
    """The framework."""
    with warnings.catch_warnings():
        # MindSpore's own modules use deprecated names; what tenterhook causes must still be an error.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        adapter = load_adapter(request.param)
    if isinstance(adapter, str):
        pytest.skip(f"{adapter} is not installed")
    return adapter
