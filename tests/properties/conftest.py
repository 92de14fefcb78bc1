from __future__ import annotations

from tests.contract.conftest import fw, needed

__all__ = ["fw", "needed"]
