"""Truncated importance sampling of the behaviour gap (papers.md 8.3; Yao et al., Liu, Li et al.). Evidence [F][C].

kap = old / mu                     per token, per turn or sequence (geometric mean), or per sequence (product)
weight = min(kap, cap)             detached; the objective itself is untouched
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..types import as_metric
from .levels import Level, level_ratio
from .objective import Correction, Method, Need, Pair, Tokens, pair_needs
from .params import CorrectionParams


@dataclass(frozen=True)
class RatioParams(CorrectionParams):
    """Which ratio a correction looks at."""

    level: Level = "token"
    """Whose ratio: the token's, the turn's or the sequence's geometric mean (turn, geometric), or the sequence's product (sequence)."""
    pair: Pair = "old/mu"
    """Which two policies; theta/mu corrects in one go where no old forward is wanted."""

    def needs(self) -> frozenset[Need]:
        """What the ratio makes necessary."""
        turns: frozenset[Need] = frozenset({"turns"}) if self.level == "turn" else frozenset()
        return pair_needs(self.pair) | turns


@dataclass(frozen=True)
class TISConfig(RatioParams):
    """Parameters of `tis`."""

    cap: float = 2.0
    """Largest weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("cap", self.cap >= 1, "must be at least 1, or on-policy tokens would be scaled down")


def correct(tokens: Tokens, config: TISConfig) -> Correction:
    """See the module's formula. Metrics: share of capped tokens and the moments of the weight, for the effective sample size."""
    raw_T = level_ratio(tokens, config.pair, config.level)
    weight_T = raw_T.clamp(max=config.cap)
    on_T = torch.where(tokens.mask_T, weight_T, 0.0).double()
    metrics = {
        "capped_share": tokens.share(raw_T > config.cap),
        "weight_mean": tokens.average(weight_T),
        "weight_square_mean": as_metric(on_T.square().sum(), tokens.mask_T.sum()),
    }
    return Correction(weight_T, torch.ones_like(tokens.mask_T), metrics)


METHOD = Method(
    name="tis",
    kind="correction",
    config=TISConfig,
    apply=correct,
    paper="Your efficient RL framework secretly brings you off-policy training (blog); When speed kills stability (blog)",
    evidence="FC",
    unit="token",
    summary="Weight old/mu, truncated above",
    needs=TISConfig.needs,
)
