"""How far one run of the worker is from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BOUND = 1e-5
"""Largest relative difference that fp32's order of summation explains."""
FLOOR = 1e-3
"""Smaller numbers are held against this one: a loss near 0 is the difference of terms of order 1."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference, and of what."""

    size: float
    quantity: str


def relative(expected: float, found: float) -> float:
    """|found - expected| in units of the expected number, but at least of `FLOOR`."""
    return abs(found - expected) / max(abs(expected), FLOOR)


def largest(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Difference:
    """Over the statistics, the log-probs at the start of the step, and the weights after it.

    A quantity that only one side has differs infinitely.
    """
    return max((Difference(*pair) for pair in _differences(expected, found)), key=lambda d: d.size)


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    for kind in ("statistics", "weights", "logp"):
        for name in sorted(expected[kind].keys() ^ found[kind].keys()):
            yield float("inf"), name
        for name in expected[kind].keys() & found[kind].keys():
            a, b = expected[kind][name], found[kind][name]
            if kind == "logp":
                apart = max(map(relative, a, b), default=0.0) if len(a) == len(b) else float("inf")
                yield apart, f"log-probs of {name}"
            else:
                yield relative(a, b), name
