"""VESPO (2602.10693): a smooth weight of the full sequence ratio. Evidence [C].

phi(w) = e^lambda w^k e^(-lambda w),  w = prod_t ratio_t;    phi(1) = 1, largest at w = k / lambda
J = sum_t sg[phi(w)] A_t log theta_t;    (k, lambda) by the sign of A
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .objective import LOG_RATIO_LIMIT, Method, Need, Surrogate, Tokens, pair_needs
from .params import ObjectiveParams


@dataclass(frozen=True)
class VESPOConfig(ObjectiveParams):
    """Parameters of `vespo`."""

    k_pos: float = 2.0
    """Power for A > 0."""
    lambda_pos: float = 3.0
    """Decay for A > 0."""
    k_neg: float = 3.0
    """Power for A <= 0."""
    lambda_neg: float = 2.0
    """Decay for A <= 0."""
    anchor: Literal["theta/mu", "theta/old"] = "theta/mu"
    """Which ratio is multiplied up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            self.require(name, getattr(self, name) >= 0, "must not be negative")


def surrogate(tokens: Tokens, config: VESPOConfig) -> Surrogate:
    """See the module's formula."""
    total_T = tokens.segments.spread(tokens.segments.sum(tokens.detached_log_ratio(config.anchor)))
    log_w_T = total_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    up_T = tokens.advantages_T > 0
    k_T = torch.where(up_T, config.k_pos, config.k_neg).to(log_w_T.dtype)
    lambda_T = torch.where(up_T, config.lambda_pos, config.lambda_neg).to(log_w_T.dtype)
    weight_T = (lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp()).exp()
    return Surrogate(-weight_T * tokens.advantages_T * tokens.logp_T, {"weight_mean": tokens.average(weight_T)})


def _needs(config: VESPOConfig) -> frozenset[Need]:
    return pair_needs(config.anchor)


METHOD = Method(
    name="vespo",
    kind="objective",
    config=VESPOConfig,
    apply=surrogate,
    paper="2602.10693",
    evidence="C",
    unit="sequence",
    summary="Smooth detached weight of the whole sequence's ratio",
    aggregation="token-mean",
    needs=_needs,
)
