"""MiniRL (2512.01374): weight by theta/mu, masked where PPO would clip theta/old. Evidence [D].

J = sum_t sg[rho_t] A_t M_t log theta_t,   rho = theta/mu
M_t = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and r < 1 - clip_low), r = theta/old;  1 otherwise
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .objective import Method, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class MiniRLConfig(ObjectiveParams):
    """Parameters of `minirl`."""

    clip_low: float = 0.2
    """Lower distance of theta/old from 1."""
    clip_high: float = 0.27
    """Upper distance of theta/old from 1."""
    weight_cap: float | None = None
    """Largest theta/mu; null for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip_low", 0 <= self.clip_low <= 1, "must be in [0, 1]; 1 means no lower bound")
        self.require("clip_high", self.clip_high >= 0, "must not be negative; the usual value is 0.27")
        self.require("weight_cap", self.weight_cap is None or self.weight_cap >= 1, "must be at least 1, or null for none")


def surrogate(tokens: Tokens, config: MiniRLConfig) -> Surrogate:
    """See the module's formula."""
    stale_T = ratio(tokens.detached_log_ratio("theta/old"))
    advantages_T = tokens.advantages_T
    outside_T = ((advantages_T > 0) & (stale_T > 1 + config.clip_high)) | ((advantages_T < 0) & (stale_T < 1 - config.clip_low))
    weight_T = ratio(tokens.detached_log_ratio("theta/mu")).clamp(max=config.weight_cap or torch.inf)
    loss_T = -torch.where(outside_T, 0.0, weight_T) * advantages_T * tokens.logp_T
    return Surrogate(loss_T, {"masked_share": tokens.share(outside_T), "weight_mean": tokens.average(weight_T)})


METHOD = Method(
    name="minirl",
    kind="objective",
    config=MiniRLConfig,
    apply=surrogate,
    paper="2512.01374",
    evidence="D",
    unit="token",
    summary="Detached theta/mu, masked by PPO's condition on theta/old",
    aggregation="token-mean",
    needs=frozenset({"recomputed_old"}),
)
