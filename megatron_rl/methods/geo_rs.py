"""Geometric rejection sampling (papers.md 8.3): keep a sequence whose mean log-ratio is small. Evidence [F][C].

    keep_i = 1[ low <= exp( 1/T_i sum_t log old/mu ) <= high ],  no weight

A geometric mean does not drift with length, as a product does. Bounds differ wildly: 0.5 / 2 in the blog, 0.999 / 1.001 in verl's presets,
0.99 / 1.01 in SkyRL. Measure the mismatch of equal weights first.
"""

from __future__ import annotations

from dataclasses import dataclass

from .levels import Level, level_ratio
from .mis import BoundParams
from .objective import Correction, Method, Tokens


@dataclass(frozen=True)
class GeoRSConfig(BoundParams):
    """Parameters of `geo_rs`."""

    level: Level = "geometric"
    """Whose ratio; `sequence` tests the product instead."""
    low: float = 0.5
    """Smallest ratio kept."""


def correct(tokens: Tokens, config: GeoRSConfig) -> Correction:
    """See the module's formula."""
    ratio_T = level_ratio(tokens, config.pair, config.level)
    keep_T = (ratio_T >= config.low) & (ratio_T <= config.high)
    return Correction.mask(keep_T, tokens, {"ratio_mean": tokens.average(ratio_T)})


METHOD = Method(
    name="geo_rs",
    kind="correction",
    config=GeoRSConfig,
    apply=correct,
    paper="When speed kills stability (blog)",
    evidence="FC",
    unit="sequence",
    summary="Drops sequences whose mean ratio is out of bounds",
    needs=GeoRSConfig.needs,
)
