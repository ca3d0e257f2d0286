"""CPPO (2606.10968): DPPO's mask with a threshold that the prefix has to earn. Evidence [F].

    w_t = 1 - (1 - w_min)(t - 1)/(T - 1),  1 if T = 1         S_t = sum_{j<=t} w_j D_j,  W_t = sum_{j<=t} w_j, over all tokens
    c_t = min( threshold, threshold + budget W_{t-1} - S_{t-1} )
    M_t = 1 if A (rho_t - 1) <= 0 or w_t D_t <= c_t; otherwise 0 (hard) or min(1, c_t / (w_t D_t)), at least 0 (soft)
    J   = sum_t M_t rho_t A_t,   rho = theta/mu, D detached

budget is a constant or a quantile of the mini-batch's divergences: clamp(P90(D), budget, 2 budget).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .divergence import Anchor, Divergence, divergence_needs, divergence_T, outward_T
from .histogram import unit_histogram, unit_quantile
from .objective import Method, Need, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class CPPOConfig(ObjectiveParams):
    """Parameters of `cppo`. Published: TV 0.15 dense / 0.2 MoE with budget 0.015 (fixed) or 0.02 (quantile); KL 0.1 with 0.002."""

    divergence: Divergence = "binary_tv"
    """What is accumulated."""
    threshold: float = 0.15
    """Largest divergence at one position."""
    w_min: float = 0.8
    """Weight of the last position; the first has 1."""
    budget: float = 0.015
    """Divergence a position may spend on average; the floor when budget_rule is quantile."""
    budget_rule: Literal["fixed", "quantile"] = "fixed"
    """Where the budget comes from."""
    quantile: float = 0.9
    """For budget_rule quantile."""
    soft: bool = False
    """Scale instead of dropping."""
    anchor: Anchor = "theta/mu"
    """Which ratio and divergence the mask looks at; the weight stays theta/mu."""
    candidates: int = 20
    """K of the top-K divergences; 20 is DPPO's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("threshold", self.threshold > 0, "must be positive; usual values are 0.15 for TV and 0.1 for KL")
        self.require("w_min", 0 < self.w_min <= 1, "must be in (0, 1]; the paper's value is 0.8")
        self.require("budget", self.budget >= 0, "must not be negative; usual values are 0.015 for TV and 0.002 for KL")
        self.require("quantile", 0 < self.quantile < 1, "must be in (0, 1); the paper's value is 0.9")
        self.require("candidates", self.candidates >= 1, "must be at least 1; DPPO's value is 20")


def statistics(tokens: Tokens, config: CPPOConfig) -> Mapping[str, Tensor]:
    """The histogram of divergences that a quantile budget needs."""
    if config.budget_rule == "fixed":
        return {}
    return {"histogram": unit_histogram(divergence_T(tokens, config.divergence, config.anchor), tokens.mask_T)}


def position_weight_T(tokens: Tokens, w_min: float) -> Tensor:
    """[T] w_t: 1 at the first loss token, falling linearly to w_min at the last."""
    index_T = tokens.segments.prefix_count().to(tokens.advantages_T.dtype)
    length_T = tokens.segments.spread(tokens.segments.count()).to(index_T.dtype)
    return 1 - (1 - w_min) * (index_T - 1).clamp(min=0) / (length_T - 1).clamp(min=1)


def allowance_T(tokens: Tokens, config: CPPOConfig, distance_T: Tensor, weight_T: Tensor) -> Tensor:
    """[T] c_t; negative once the prefix has overspent."""
    budget: Tensor | float = config.budget
    if config.budget_rule == "quantile":
        budget = unit_quantile(tokens.totals["histogram"], config.quantile).clamp(config.budget, 2 * config.budget).to(weight_T.dtype)
    slack_T = budget * weight_T - weight_T * distance_T
    before_T = tokens.segments.prefix_sum(slack_T) - slack_T
    return config.threshold + before_T.clamp(max=0)


def surrogate(tokens: Tokens, config: CPPOConfig) -> Surrogate:
    """See the module's formula. Metrics: share of masked tokens, mean allowance, mean divergence."""
    distance_T = divergence_T(tokens, config.divergence, config.anchor)
    weight_T = position_weight_T(tokens, config.w_min)
    allowed_T = allowance_T(tokens, config, distance_T, weight_T)
    spent_T = weight_T * distance_T
    over_T = (spent_T > allowed_T) & outward_T(tokens.detached_log_ratio(config.anchor), tokens.advantages_T)
    soft_T = allowed_T.clamp(min=0) / spent_T.clamp(min=torch.finfo(spent_T.dtype).tiny)
    keep_T = torch.where(over_T, soft_T if config.soft else torch.zeros_like(soft_T), 1.0)
    loss_T = -keep_T * ratio(tokens.drift_T) * tokens.advantages_T
    metrics = {
        "masked_share": tokens.share(over_T),
        "allowance_mean": tokens.average(allowed_T),
        "divergence_mean": tokens.average(distance_T),
    }
    return Surrogate(loss_T, metrics)


def _needs(config: CPPOConfig) -> frozenset[Need]:
    return divergence_needs(config.divergence, config.anchor)


METHOD = Method(
    name="cppo",
    kind="objective",
    config=CPPOConfig,
    apply=surrogate,
    paper="2606.10968",
    evidence="F",
    unit="prefix",
    summary="Divergence mask with a budget shared along the prefix",
    aggregation="token-mean",
    needs=_needs,
    candidates=lambda config: int(config.candidates),
    statistics=statistics,
)
