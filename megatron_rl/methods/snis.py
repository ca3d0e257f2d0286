"""Self-normalised importance sampling (papers.md 8.3), "batch normalise". Evidence [F][C].

    w_i <- w_i / mean(w),   w = min(old/mu, cap);   the mean over the mini-batch's tokens (level token, turn) or sequences

Bias O(1/N) in exchange for weights whose mean is 1. Effective sample size: (sum w)^2 / sum w^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .levels import Level, level_ratio
from .objective import Correction, Method, Tokens
from .tis import RatioParams


@dataclass(frozen=True)
class SNISConfig(RatioParams):
    """Parameters of `snis`."""

    level: Level = "sequence"
    """Whose ratio: the token's, the turn's or the sequence's geometric mean (turn, geometric), or the sequence's product (sequence)."""
    cap: float | None = None
    """Largest weight before normalising; null for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("cap", self.cap is None or self.cap >= 1, "must be at least 1, or null for none")


def raw_weight_T(tokens: Tokens, config: SNISConfig) -> Tensor:
    """[T] the weight before normalising."""
    return level_ratio(tokens, config.pair, config.level).clamp(max=torch.inf if config.cap is None else config.cap)


def statistics(tokens: Tokens, config: SNISConfig) -> Mapping[str, Tensor]:
    """Sum and count of the weights, and of their squares, fp64."""
    segments = tokens.segments
    share_T = torch.ones_like(tokens.advantages_T, dtype=torch.float64)
    if config.level in ("sequence", "geometric"):  # each sequence counts once, shared out over its tokens
        share_T = 1 / segments.spread(segments.count()).double().clamp(min=1)
    share_T = torch.where(tokens.mask_T, share_T, 0.0)
    weight_T = raw_weight_T(tokens, config).double()
    return {"sum": (share_T * weight_T).sum(), "square": (share_T * weight_T.square()).sum(), "count": share_T.sum()}


def correct(tokens: Tokens, config: SNISConfig) -> Correction:
    """See the module's formula. Metrics: the mean before normalising and the effective share (sum w)^2 / (n sum w^2)."""
    total, square, count = (tokens.totals[key] for key in ("sum", "square", "count"))
    mean = total / count.clamp(min=1e-12)
    raw_T = raw_weight_T(tokens, config)
    weight_T = raw_T / torch.where(mean > 0, mean, torch.ones_like(mean)).to(raw_T.dtype)
    effective = total.square() / (count * square).clamp(min=1e-300)
    ones = tokens.mask_T.sum()
    metrics = {"raw_mean": tokens.average(raw_T), "effective_share": (effective * ones, ones.double())}
    return Correction(weight_T, torch.ones_like(tokens.mask_T), metrics)


METHOD = Method(
    name="snis",
    kind="correction",
    config=SNISConfig,
    apply=correct,
    paper="When speed kills stability (blog)",
    evidence="FC",
    unit="sequence",
    summary="Importance weight divided by its mean over the mini-batch",
    needs=SNISConfig.needs,
    statistics=statistics,
)
