"""Masked importance sampling of the behaviour gap (papers.md 8.3). Evidence [F][C].

    weight = kap,  keep = 1[ low <= kap <= high ],   kap = old/mu per token, turn or sequence; detached

At sequence level with low = 0 this is seq-MIS: biased by what it drops, but with bounded variance. At token level with bounds 0.5 and 5
it is IcePop's weight (`icepop`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .levels import Level, level_ratio
from .objective import Correction, Method, Tokens
from .tis import RatioParams


@dataclass(frozen=True)
class BoundParams(RatioParams):
    """A closed interval of the ratio."""

    low: float = 0.0
    """Smallest ratio kept."""
    high: float = 2.0
    """Largest ratio kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("low", 0 <= self.low <= 1, "must be in [0, 1], or on-policy tokens would be dropped")
        self.require("high", self.high >= 1, "must be at least 1, or on-policy tokens would be dropped")


@dataclass(frozen=True)
class MISConfig(BoundParams):
    """Parameters of `mis`."""

    level: Level = "sequence"
    """Whose ratio: the token's, the turn's or the sequence's geometric mean (turn, geometric), or the sequence's product (sequence)."""


def correct(tokens: Tokens, config: BoundParams) -> Correction:
    """See the module's formula. Metrics: share kept, share below and above, mean weight."""
    ratio_T = level_ratio(tokens, config.pair, config.level)
    below_T, above_T = ratio_T < config.low, ratio_T > config.high
    keep_T = ~(below_T | above_T)
    metrics = {
        "kept_share": tokens.share(keep_T),
        "below_share": tokens.share(below_T),
        "above_share": tokens.share(above_T),
        "weight_mean": tokens.average(ratio_T * keep_T),
    }
    return Correction(ratio_T, keep_T, metrics)


METHOD = Method(
    name="mis",
    kind="correction",
    config=MISConfig,
    apply=correct,
    paper="When speed kills stability (blog)",
    evidence="FC",
    unit="sequence",
    summary="Weight old/mu inside bounds, nothing outside",
    needs=MISConfig.needs,
)
