"""CISPO (2506.13585): the clipped ratio as a detached weight, so no token loses its gradient. Evidence [F].

    J = 1/sum|o| sum_t sg[ clip(r_t, 1 - clip_low, 1 + clip_high) ] A_t log theta_t

Optional unified mask: drop a token when A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .objective import Method, Need, Surrogate, Tokens, pair_needs, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class CISPOConfig(ObjectiveParams):
    """Parameters of `cispo`."""

    clip_low: float | None = None
    """Lower distance of the ratio from 1; null for none, as published."""
    clip_high: float = 0.28
    """Upper distance of the ratio from 1. The paper tunes it; ScaleRL uses 5.0, slime 1.0 or 4.0."""
    unified_mask: bool = False
    """Drop tokens that PPO would clip."""
    anchor: Literal["theta/old", "theta/mu"] = "theta/old"
    """Which ratio is clipped; papers disagree (papers.md section 16)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip_low", self.clip_low is None or 0 <= self.clip_low < 1, "must be in [0, 1), or null for no lower bound")
        self.require("clip_high", self.clip_high >= 0, "must not be negative; usual values lie between 0.28 and 5")


def surrogate(tokens: Tokens, config: CISPOConfig) -> Surrogate:
    """See the module's formula."""
    low, high = 1 - (1.0 if config.clip_low is None else config.clip_low), 1 + config.clip_high
    ratio_T = ratio(tokens.detached_log_ratio(config.anchor))
    weight_T = ratio_T.clamp(low, high)
    metrics = {"clip_share_high": tokens.share(ratio_T > high), "clip_share_low": tokens.share(ratio_T < low)}
    if config.unified_mask:
        outside_T = ((tokens.advantages_T > 0) & (ratio_T > high)) | ((tokens.advantages_T < 0) & (ratio_T < low))
        weight_T = torch.where(outside_T, 0.0, weight_T)
        metrics["masked_share"] = tokens.share(outside_T)
    return Surrogate(-weight_T * tokens.advantages_T * tokens.logp_T, metrics)


def _needs(config: CISPOConfig) -> frozenset[Need]:
    return pair_needs(config.anchor)


METHOD = Method(
    name="cispo",
    kind="objective",
    config=CISPOConfig,
    apply=surrogate,
    paper="2506.13585",
    evidence="F",
    unit="token",
    summary="Clipped ratio as a detached weight; every token keeps its gradient",
    aggregation="token-mean",
    needs=_needs,
)
