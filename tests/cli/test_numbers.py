"""How numbers are written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenterhook.reporters.numbers import count, number, shape, share, size, span


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0"), (-0.0, "0"), (1.0, "1"), (0.8117, "0.812"), (-1.4, "-1.4"), (12.345, "12.3"), (123.4, "123"),
        (9994.0, "9994"), (9996.0, "1e+04"), (97000.0, "9.7e+04"), (0.001, "0.001"), (0.00123456, "0.00123"), (9.99e-4, "9.99e-04"),
        (1.5e-5, "1.5e-05"), (1e-12, "1e-12"), (1e300, "1e+300"), (0.9996, "1"), (9.996, "10"), (99.96, "100"),
        (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e300, 1e300))
def test_number_keeps_three_digits_in_nine_characters(value: float) -> None:
    text = number(value)
    assert len(text.lstrip("-")) <= 9
    assert math.isclose(float(text), value, rel_tol=0.0051, abs_tol=0)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (9876, "9,876"), (1_234_567, "1.23 M"), (2_000_000_000, "2 G")])
def test_count(value: int, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (512, "512 B"), (31_400_000, "31.4 MB"), (999_900, "1 MB"), (5 * 10**13, "50 TB")]
)
def test_size(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.4217, "0.422 s"), (59.97, "1m00s"), (761.2, "12m41s"), (11100, "3h05m")]
)
def test_span(value: float, text: str) -> None:
    assert span(value) == text


def test_shape_and_share() -> None:
    assert [shape((2, 3)), shape(()), shape(None)] == ["2x3", "scalar", "-"]
    assert share(0.018) == "+1.8\N{NO-BREAK SPACE}%"
