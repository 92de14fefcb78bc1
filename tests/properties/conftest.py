from __future__ import annotations

from tests.contract.conftest import fw

__all__ = ["fw"]
