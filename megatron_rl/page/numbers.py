"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any

from .figure import Format

PERCENT = "\u202f%"
"""With a narrow space that does not break."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, zeros at the end included; powers of ten outside 0.001 .. 99,999; a dash for nothing."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return minus(f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip("."))
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return minus(f"{mantissa}×10") + str(int(exponent)).translate(_RAISED)


def percent(value: float | None) -> str:
    """A share; two significant digits below 1 %."""
    if value is None or not math.isfinite(value):
        return "–"
    scaled = 100 * value
    if abs(scaled) < 0.01:
        return number(scaled, 2) + PERCENT
    return minus(f"{scaled:.2f}" if abs(scaled) < 1 else f"{scaled:.1f}") + PERCENT


def shown(value: Any, form: Format) -> str:
    """A table's cell."""
    if value is None:
        return "–"
    if form == "text" or isinstance(value, str):
        return str(value)
    if form == "percent":
        return percent(value)
    if form == "integer":
        return f"{value:,.0f}"
    return number(value) + (" s" if form == "seconds" else "")


def minus(text: str) -> str:
    """The sign that is as wide as a digit."""
    return text.replace("-", "\u2212")
