"""EPIC, prefix-level clipping in an exact reverse-KL coordinate. Evidence [N]: the paper was not located.

A RECONSTRUCTION [I] from a short summary (papers.md 6.4), not the paper's method; every choice is a parameter so that the real formula
can be dropped in.

    W_t = prod_{i<=t} rho_i,  rho = theta/mu                      the exact weight of papers.md 2.1
    u(W) = W log W - W + 1   (reverse)   E_mu[u] = KL(theta_1:t || mu_1:t)
         = W - 1 - log W     (forward)   E_mu[u] = KL(mu_1:t || theta_1:t)
    J_t = min( W_t A, clip(W_t, W_lo, W_hi) A ),   u(W_lo) = u(W_hi) = delta
    gradient own:     through log theta_t alone
             prefix:  through every log theta_i, i <= t: the exact derivative of sum_t J_t
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .objective import LOG_RATIO_LIMIT, Method, Need, Surrogate, Tokens, pair_needs, ratio
from .params import ObjectiveParams

Generator = Literal["reverse", "forward"]


@dataclass(frozen=True)
class EPICConfig(ObjectiveParams):
    """Parameters of `epic` [I]."""

    delta: float = 0.05
    """Trust region in the coordinate u, nats."""
    generator: Generator = "reverse"
    """Which prefix KL u estimates."""
    gradient: Literal["own", "prefix"] = "own"
    """Which log-probs the weight's gradient reaches. A correction stacked on `prefix` weighs token i's whole coefficient by its own
    weight at i, not each J_t by its own."""
    anchor: Literal["theta/mu", "theta/old"] = "theta/mu"
    """Which ratio is multiplied up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("delta", self.delta > 0, "must be positive; 0.05 allows prefix weights between 0.70 and 1.33")


def generator_value(weight: float, generator: Generator) -> float:
    """u(W) for W > 0."""
    return weight * math.log(weight) - weight + 1 if generator == "reverse" else weight - 1 - math.log(weight)


def window(delta: float, generator: Generator) -> tuple[float, float]:
    """(W_lo, W_hi), the two roots of u(W) = delta around 1, to the last digits of a double.

    In closed form the reverse roots are (delta - 1) / W((delta - 1) / e) on Lambert's branches -1 and 0. The lower one exists only for
    delta < 1, because u(0) = 1; beyond it nothing is too small and W_lo is 0.
    """

    def root(inside: float, outside: float) -> float:  # of log W; u grows from inside (u < delta) to outside (u >= delta)
        for _ in range(200):
            middle = (inside + outside) / 2
            if generator_value(math.exp(middle), generator) < delta:
                inside = middle
            else:
                outside = middle
        return math.exp((inside + outside) / 2)

    low = 0.0 if generator == "reverse" and delta >= 1 else root(0.0, -(delta + 2) if generator == "forward" else -700.0)
    return low, root(0.0, math.log(delta + 3) + 1)


def surrogate(tokens: Tokens, config: EPICConfig) -> Surrogate:
    """See the module's formula."""
    segments, advantages_T, logp_T = tokens.segments, tokens.advantages_T, tokens.logp_T
    low, high = window(config.delta, config.generator)
    log_weight_T = segments.prefix_sum(tokens.detached_log_ratio(config.anchor)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight_T = ratio(log_weight_T)
    clipped_T = ((advantages_T > 0) & (weight_T > high)) | ((advantages_T < 0) & (weight_T < low))
    gain_T = torch.minimum(weight_T * advantages_T, weight_T.clamp(low, high) * advantages_T)
    coefficient_T = torch.where(clipped_T, 0.0, weight_T * advantages_T)
    if config.gradient == "prefix":  # token i moves every later weight: the sum over t >= i
        total_T = segments.spread(segments.sum(coefficient_T))
        coefficient_T = total_T - segments.prefix_sum(coefficient_T) + coefficient_T
    loss_T = -(gain_T + coefficient_T * (logp_T - logp_T.detach()))
    return Surrogate(loss_T, {"clip_share": tokens.share(clipped_T), "weight_mean": tokens.average(weight_T)})


def _needs(config: EPICConfig) -> frozenset[Need]:
    return pair_needs(config.anchor)


METHOD = Method(
    name="epic",
    kind="objective",
    config=EPICConfig,
    apply=surrogate,
    paper="EPIC (not located)",
    evidence="NI",
    unit="prefix",
    summary="Reconstruction: prefix ratio clipped where its KL coordinate exceeds delta",
    aggregation="token-mean",
    needs=_needs,
)
