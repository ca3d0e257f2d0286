"""The colour of a log-ratio: red where the trainer thinks a token likelier than the engine did, blue where less, by order of size."""

from __future__ import annotations

import math

FAINTEST, STRONGEST = 1e-4, 1.0
"""|d| below and above which all is alike; between them colour grows with the logarithm, four orders of size."""
RED, BLUE = (196, 52, 33), (29, 95, 180)

Rgb = tuple[int, int, int]


def strength(d: float) -> float:
    """0 .. 1."""
    if not math.isfinite(d):
        return 1.0
    size = min(max(abs(d), FAINTEST), STRONGEST)
    return math.log(size / FAINTEST) / math.log(STRONGEST / FAINTEST)


def hue(d: float) -> Rgb:
    """At full strength."""
    return RED if d > 0 else BLUE


def over(d: float, ground: Rgb) -> Rgb:
    """Laid over a ground."""
    s = strength(d)
    return tuple(round(g + (h - g) * s) for g, h in zip(ground, hue(d), strict=True))  # type: ignore[return-value]


def readable_on(ground: Rgb) -> Rgb:
    """Black or white, whichever stands out more."""
    light = 0.2126 * ground[0] + 0.7152 * ground[1] + 0.0722 * ground[2]
    return (0, 0, 0) if light > 140 else (255, 255, 255)
