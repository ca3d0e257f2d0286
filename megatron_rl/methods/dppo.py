"""DPPO (2602.04879): a mask on the divergence of the token's distribution instead of a clip on its ratio. Evidence [F][C].

    M_t = 0 if D_t > threshold and (A > 0, r > 1 or A < 0, r < 1);  1 otherwise      D detached
    L_t = -A_t sg[ min(r_t, ratio_cap) ] M_t log theta_t,   r = theta/mu

D: binary or top-K, TV or KL(mu || theta). The paper anchors at mu and reports that anchoring at old destabilises; the anchor is a switch
because other papers disagree. The weight already contains old/mu: `tis` and its kin on top would
apply it twice. Advantages are meant without the standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .divergence import Anchor, Divergence, divergence_needs, divergence_T, outward_T
from .objective import Method, Need, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class DPPOConfig(ObjectiveParams):
    """Parameters of `dppo`."""

    divergence: Divergence = "binary_tv"
    """What the mask looks at."""
    threshold: float = 0.15
    """Outward moves beyond it are masked. TV: 0.15 for dense models, 0.2 for MoE; KL: 0.05 nats."""
    ratio_cap: float | None = 20.0
    """Largest detached ratio: 5 in the paper's scaling runs, 10 in its repository, 20 in verl; null for none."""
    anchor: Anchor = "theta/mu"
    """Which ratio and divergence the mask looks at; the weight stays theta/mu."""
    candidates: int = 20
    """K of the top-K divergences; 20 is DPPO's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("threshold", self.threshold > 0, "must be positive; usual values are 0.15 for TV and 0.05 for KL")
        self.require("ratio_cap", self.ratio_cap is None or self.ratio_cap >= 1, "must be at least 1, or null for none")
        self.require("candidates", self.candidates >= 1, "must be at least 1; DPPO's value is 20")


def surrogate(tokens: Tokens, config: DPPOConfig) -> Surrogate:
    """See the module's formula. Metrics: share masked by the sign of the advantage, mean divergence."""
    distance_T = divergence_T(tokens, config.divergence, config.anchor)
    masked_T = (distance_T > config.threshold) & outward_T(tokens.detached_log_ratio(config.anchor), tokens.advantages_T)
    weight_T = ratio(tokens.detached_log_ratio("theta/mu")).clamp(max=torch.inf if config.ratio_cap is None else config.ratio_cap)
    loss_T = -torch.where(masked_T, 0.0, weight_T) * tokens.advantages_T * tokens.logp_T
    metrics = {
        "masked_share_positive": tokens.share(masked_T & (tokens.advantages_T > 0)),
        "masked_share_negative": tokens.share(masked_T & (tokens.advantages_T < 0)),
        "divergence_mean": tokens.average(distance_T),
    }
    return Surrogate(loss_T, metrics)


def _needs(config: DPPOConfig) -> frozenset[Need]:
    return divergence_needs(config.divergence, config.anchor)


METHOD = Method(
    name="dppo",
    kind="objective",
    config=DPPOConfig,
    apply=surrogate,
    paper="2602.04879",
    evidence="FC",
    unit="token",
    summary="Masks outward moves of tokens whose distribution moved too far",
    aggregation="seq-mean-token-sum-norm",
    needs=_needs,
    candidates=lambda config: int(config.candidates),
)
