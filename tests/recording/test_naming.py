"""What a text in ``recording["..."]`` means where several models were recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tenterhook.errors import NotRecordedError
from tenterhook.recording.naming import look_up

PATHS = [("Net", ""), ("Net", "features.0"), ("Net", "features.1"), ("Loss", ""), ("Loss", "features.0")]
LOOKUP: Any = None  # nothing is looked up of what does not exist


def nearest(text: str) -> list[str]:
    with pytest.raises(NotRecordedError) as error:
        look_up(text, ["Net", "Loss"], PATHS, LOOKUP)
    return str(error.value).partition("the nearest are ")[2].split(", ")


def test_each_module_is_among_the_nearest_once() -> None:
    assert sorted(nearest("feature.0")) == ["Loss/features.0", "features.0", "features.1"]


def test_the_nearest_are_spelled_as_the_text_is() -> None:
    assert nearest("Net/feature.1")[0] == "Net/features.1"
    assert "features.1" not in nearest("Net/feature.1")
