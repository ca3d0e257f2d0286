"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, lowest to highest, averaged into at most `width` of them; a value that is not finite is a blank."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [_mean(values[start:end]) for start, end in itertools.pairwise(edges)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return " " * count
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_block(value, low, span) for value in means)


def _block(value: float, low: float, span: float) -> str:
    if not math.isfinite(value):
        return " "
    if span == 0:
        return BLOCKS[len(BLOCKS) // 2]
    return BLOCKS[min(int((value - low) / span * len(BLOCKS)), len(BLOCKS) - 1)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
