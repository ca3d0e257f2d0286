"""Adaptive Clip Policy Optimization (2606.22570; not the advantage clip of 2609.36816). Evidence [A][C].

bin(t)  = which of `bins` equal parts of [0, 1] theta(a_t) falls in
sigma_b = sqrt( population variance of r over the mini-batch's tokens in bin b + 1e-8 ),   r = theta/old
eps_b   = clip( base + alpha sigma_b, eps_min, eps_max )
L_t     = PPO's clip with 1 -+ eps_bin(t), then the dual clip
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Method, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class ACPOAdaptiveConfig(ObjectiveParams):
    """Parameters of `acpo_adaptive`."""

    bins: int = 5
    """Equal parts of the probability range."""
    base: float = 0.2
    """eps of a bin whose ratios do not vary."""
    alpha: float = 3.0
    """Widening per standard deviation of the ratio."""
    eps_min: float = 0.0
    """Smallest eps."""
    eps_max: float = 3.0
    """Largest eps."""
    dual_clip: float | None = 3.0
    """Largest ratio that a negative advantage may push with; null switches it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("bins", self.bins >= 1, "must be at least 1; the paper's value is 5")
        self.require("eps_min", 0 <= self.eps_min <= self.eps_max, f"must be between 0 and eps_max = {self.eps_max}")
        self.require("dual_clip", self.dual_clip is None or self.dual_clip > 1, "must exceed 1, or be null to switch it off")


def _bin_T(tokens: Tokens, bins: int) -> Tensor:
    return (tokens.logp_T.detach().exp() * bins).long().clamp(0, bins - 1)


def statistics(tokens: Tokens, config: ACPOAdaptiveConfig) -> Mapping[str, Tensor]:
    """Count, sum of r - 1 and of its square in each bin, fp64 (shifted by 1 so that the variance keeps its digits)."""
    bin_M = _bin_T(tokens, config.bins)[tokens.mask_T]
    shifted_M = (ratio(tokens.detached_log_ratio("theta/old")) - 1)[tokens.mask_T].double()

    def binned(x_M: Tensor) -> Tensor:
        return x_M.new_zeros(config.bins).index_add(0, bin_M, x_M)

    return {"count": binned(torch.ones_like(shifted_M)), "sum": binned(shifted_M), "square": binned(shifted_M.square())}


def widths(totals: Mapping[str, Tensor], config: ACPOAdaptiveConfig) -> Tensor:
    """[bins] eps of each bin, fp64."""
    count = totals["count"].clamp(min=1)
    variance = (totals["square"] / count - (totals["sum"] / count).square()).clamp(min=0)
    return (config.base + config.alpha * (variance + 1e-8).sqrt()).clamp(config.eps_min, config.eps_max)


def surrogate(tokens: Tokens, config: ACPOAdaptiveConfig) -> Surrogate:
    """See the module's formula. Metrics: share of clipped tokens and the mean eps."""
    ratio_T, advantages_T = ratio(tokens.log_ratio_T), tokens.advantages_T
    eps_T = widths(tokens.totals, config)[_bin_T(tokens, config.bins)].to(ratio_T.dtype)
    clamped_T = torch.minimum(torch.maximum(ratio_T, 1 - eps_T), 1 + eps_T)
    gain_T = torch.minimum(ratio_T * advantages_T, clamped_T * advantages_T)
    if config.dual_clip is not None:
        gain_T = torch.maximum(gain_T, torch.where(advantages_T < 0, config.dual_clip * advantages_T, -torch.inf))
    metrics = {"clip_share": tokens.share(gain_T != ratio_T * advantages_T), "eps_mean": tokens.average(eps_T)}
    return Surrogate(-gain_T, metrics)


METHOD = Method(
    name="acpo_adaptive",
    kind="objective",
    config=ACPOAdaptiveConfig,
    apply=surrogate,
    paper="2606.22570",
    evidence="AC",
    unit="token",
    summary="PPO whose clip width follows the ratio's spread in each probability bin",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
    statistics=statistics,
)
