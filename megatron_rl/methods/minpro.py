"""MinPRO (2601.22718): the token's ratio times the smallest ratio before it, as a detached weight. Evidence [D], objective exact.

    w_t = clip( min(1 at t = 1; rho_i for i < t) * rho_t, 1 - clip_low, 1 + clip_high )
    J   = 1/sum|o| sum_t sg[w_t] A_t log theta_t

The minimum stands in for the exact prefix product without accumulating its variance. Published with theta over the sampling policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .objective import Method, Need, Surrogate, Tokens, pair_needs, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class MinPROConfig(ObjectiveParams):
    """Parameters of `minpro`. Bounds "like CISPO"; their values are not confirmed."""

    clip_low: float | None = None
    """Lower distance of the weight from 1; null for none."""
    clip_high: float = 0.28
    """Upper distance of the weight from 1."""
    anchor: Literal["theta/mu", "theta/old"] = "theta/mu"
    """Which ratio; theta/old is the published one where old sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip_low", self.clip_low is None or 0 <= self.clip_low < 1, "must be in [0, 1), or null for no lower bound")
        self.require("clip_high", self.clip_high >= 0, "must not be negative; a usual value is 0.28")


def surrogate(tokens: Tokens, config: MinPROConfig) -> Surrogate:
    """See the module's formula."""
    low, high = 1 - (1.0 if config.clip_low is None else config.clip_low), 1 + config.clip_high
    log_T = tokens.detached_log_ratio(config.anchor)
    before_T = tokens.segments.prefix_min_before(log_T)
    product_T = ratio(torch.where(before_T.isinf(), 0.0, before_T) + log_T)
    weight_T = product_T.clamp(low, high)
    metrics = {"clip_share_high": tokens.share(product_T > high), "weight_mean": tokens.average(weight_T)}
    return Surrogate(-weight_T * tokens.advantages_T * tokens.logp_T, metrics)


def _needs(config: MinPROConfig) -> frozenset[Need]:
    return pair_needs(config.anchor)


METHOD = Method(
    name="minpro",
    kind="objective",
    config=MinPROConfig,
    apply=surrogate,
    paper="2601.22718",
    evidence="D",
    unit="prefix",
    summary="Smallest prefix ratio times the token ratio, detached",
    aggregation="token-mean",
    needs=_needs,
)
