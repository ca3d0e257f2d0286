"""Veto (papers.md 8.3): one catastrophic token drops its whole sequence. Evidence [F][C].

keep_i = 1[ min_t kap_t >= low ] and 1[ max_t kap_t <= high ],   kap = old/mu
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .objective import Correction, Method, Need, Pair, Tokens, pair_needs
from .params import CorrectionParams


@dataclass(frozen=True)
class VetoConfig(CorrectionParams):
    """Parameters of `veto`."""

    low: float = 1e-4
    """A token ratio below it drops the sequence."""
    high: float | None = None
    """A token ratio above it drops the sequence; SkyRL uses 100, null for none."""
    pair: Pair = "old/mu"
    """Which two policies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("low", 0 < self.low <= 1, "must be in (0, 1]; the usual value is 1e-4")
        self.require("high", self.high is None or self.high >= 1, "must be at least 1, or null for none")


def correct(tokens: Tokens, config: VetoConfig) -> Correction:
    """See the module's formula. The test is on log-ratios: no clamp hides an extreme one."""
    log_T = tokens.detached_log_ratio(config.pair)
    segments = tokens.segments
    keep_T = segments.spread(segments.min(log_T)) >= math.log(config.low)
    if config.high is not None:
        keep_T = keep_T & (segments.spread(segments.max(log_T)) <= math.log(config.high))
    return Correction.mask(keep_T, tokens)


def _needs(config: VetoConfig) -> frozenset[Need]:
    return pair_needs(config.pair)


METHOD = Method(
    name="veto",
    kind="correction",
    config=VetoConfig,
    apply=correct,
    paper="When speed kills stability (blog)",
    evidence="FC",
    unit="sequence",
    summary="Drops sequences with one catastrophic token",
    needs=_needs,
)
