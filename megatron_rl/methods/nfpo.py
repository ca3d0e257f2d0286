"""NFPO (2605.20865): the token term times the product of the next ratios. Evidence [A], placement of mask and detach [I].

    J_t = M_t A_t (rho_t - 1) sg[ prod_{j=t+1}^{t+N-1} rho_j ],   rho = theta/mu

N = 1 is PPO's first-order surrogate; N = T is the exact return difference (papers.md 2.5). Inferred here: the product is detached and
capped, and M is DPPO's divergence mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .divergence import Anchor, Divergence, divergence_needs, divergence_T, outward_T
from .objective import Method, Need, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class NFPOConfig(ObjectiveParams):
    """Parameters of `nfpo` [I]."""

    steps: int = 2
    """N: tokens whose ratios enter, the own one included. The paper's value is not confirmed."""
    trace_cap: float = 10.0
    """Largest product of the following ratios."""
    divergence: Divergence = "binary_tv"
    """What the mask looks at."""
    threshold: float = 0.15
    """Outward moves beyond it are masked; a probability for TV, nats for KL."""
    anchor: Anchor = "theta/mu"
    """Which ratio."""
    candidates: int = 20
    """K of the top-K divergences; 20 is DPPO's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("steps", self.steps >= 1, "must be at least 1, which is the first-order surrogate")
        self.require("trace_cap", self.trace_cap >= 1, "must be at least 1, or on-policy traces would be scaled down")
        self.require("threshold", self.threshold > 0, "must be positive; usual values are 0.15 for TV and 0.05 for KL")
        self.require("candidates", self.candidates >= 1, "must be at least 1; DPPO's value is 20")


def surrogate(tokens: Tokens, config: NFPOConfig) -> Surrogate:
    """See the module's formula."""
    log_T = tokens.detached_log_ratio(config.anchor)
    trace_T = ratio(tokens.segments.window_sum_after(log_T, config.steps - 1)).clamp(max=config.trace_cap)
    far_T = divergence_T(tokens, config.divergence, config.anchor) > config.threshold
    masked_T = far_T & outward_T(log_T, tokens.advantages_T)
    step_T = ratio(tokens.live_log_ratio(config.anchor)) - 1
    loss_T = -torch.where(masked_T, 0.0, trace_T * tokens.advantages_T) * step_T
    return Surrogate(loss_T, {"masked_share": tokens.share(masked_T), "trace_mean": tokens.average(trace_T)})


def _needs(config: NFPOConfig) -> frozenset[Need]:
    return divergence_needs(config.divergence, config.anchor)


METHOD = Method(
    name="nfpo",
    kind="objective",
    config=NFPOConfig,
    apply=surrogate,
    paper="2605.20865",
    evidence="AI",
    unit="prefix",
    summary="Ratio times the product of the next N - 1 ratios (mask and detach inferred)",
    aggregation="token-mean",
    needs=_needs,
    candidates=lambda config: int(config.candidates),
)
