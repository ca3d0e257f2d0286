"""CTPO (2605.07331): the cumulative prefix ratio, with a clip window that grows along the sequence. Evidence [A][C].

logW_t = sum_{i<=t} clamp(l_i, +-20)                               loss tokens only, l = log theta/old
log w_t = min( sg[logW_t] + log theta_t - sg[log theta_t], 10 )    own-token gradient
J_t = min( w_t A, exp(clip(log w_t, -low t^p, +high t^p)) A ),     p = 0.5;  p = 0 is a uniform window
A < 0:  J_t = max( J_t, A exp(high t^p) )                          dual clip of the same growth
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Metric
from .objective import LOG_RATIO_LIMIT, Method, Surrogate, Tokens
from .params import ObjectiveParams

LOG_WEIGHT_LIMIT = 10.0
"""Largest log w_t before exp, as in the reference code."""


@dataclass(frozen=True)
class PrefixClipParams(ObjectiveParams):
    """A window in log space, low t^power below and high t^power above 0, at the t-th loss token."""

    low: float = 0.025
    """Lower half-width at t = 1, nats."""
    high: float = 0.05
    """Upper half-width at t = 1, nats."""
    power: float = 0.5
    """Growth of the window with t."""
    dual_clip: bool = True
    """Bound what a negative advantage may push with, at the window's upper edge."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("low", self.low >= 0, "must not be negative; the reference code uses 0.025")
        self.require("high", self.high >= 0, "must not be negative; the reference code uses 0.05")
        self.require("power", -1 <= self.power <= 1, "must be in [-1, 1]; 0.5 for prefix products, -0.5 for prefix means, 0 for neither")


@dataclass(frozen=True)
class CTPOConfig(PrefixClipParams):
    """Parameters of `ctpo`."""


def clamped_log_ratio_T(tokens: Tokens) -> Tensor:
    """[T] log theta/old, detached, clamped to +-20."""
    return tokens.detached_log_ratio("theta/old").clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def prefix_clipped(log_value_T: Tensor, tokens: Tokens, config: PrefixClipParams) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's pessimistic minimum for a detached log-weight with the own token's gradient: (loss [T], metrics)."""
    advantages_T = tokens.advantages_T
    log_w_T = (log_value_T + tokens.logp_T - tokens.logp_T.detach()).clamp(max=LOG_WEIGHT_LIMIT)
    growth_T = tokens.segments.prefix_count().clamp(min=1).to(log_w_T.dtype).pow(config.power)
    low_T, high_T = -config.low * growth_T, config.high * growth_T
    clipped_T = torch.minimum(torch.maximum(log_w_T, low_T), high_T)
    gain_T = torch.minimum(log_w_T.exp() * advantages_T, clipped_T.exp() * advantages_T)
    metrics = {
        "clip_share_high": tokens.share((advantages_T > 0) & (log_w_T > high_T)),
        "clip_share_low": tokens.share((advantages_T < 0) & (log_w_T < low_T)),
    }
    if config.dual_clip:
        bound_T = torch.where(advantages_T < 0, advantages_T * high_T.exp(), -torch.inf)
        metrics["dual_clip_share"] = tokens.share(bound_T > gain_T)
        gain_T = torch.maximum(gain_T, bound_T)
    return -gain_T, metrics


def surrogate(tokens: Tokens, config: CTPOConfig) -> Surrogate:
    """See the module's formula."""
    loss_T, metrics = prefix_clipped(tokens.segments.prefix_sum(clamped_log_ratio_T(tokens)), tokens, config)
    return Surrogate(loss_T, metrics)


METHOD = Method(
    name="ctpo",
    kind="objective",
    config=CTPOConfig,
    apply=surrogate,
    paper="2605.07331",
    evidence="AC",
    unit="prefix",
    summary="Cumulative prefix ratio in a window growing with the square root of the position",
    aggregation="token-mean",
    needs=frozenset({"old"}),
)
