"""MindSpore for tests: its warnings at import kept out of ours, its operations run where they are called."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    # MindSpore's own modules use deprecated names; what tenterhook causes must still be an error.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    import mindspore

mindspore.set_context(mode=mindspore.PYNATIVE_MODE, pynative_synchronize=True)

from tests.mindspore.loading import CODE_AT_FIRST, LOADER, assert_untouched  # noqa: E402


@pytest.fixture(params=["code swap", "parameter walk"])
def load_hooks_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs with both ways into the loader, and each must leave nothing behind."""
    import tenterhook.mindspore as thms
    from tenterhook.backends import _mindspore_loader

    thms.uninstall()
    if request.param == "parameter walk":
        # What `inspect` says of a framework that is installed without its sources.
        monkeypatch.setattr(_mindspore_loader.inspect, "findsource", _no_source)
    thms.install()
    swapped = LOADER.__code__ is not CODE_AT_FIRST
    assert swapped == (request.param == "code swap")
    yield
    thms.uninstall()
    assert_untouched()


def _no_source(_: object) -> Any:
    raise OSError("could not get source code")
