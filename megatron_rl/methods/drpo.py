"""DRPO (2606.09821): DPPO's mask as a smooth penalty. Evidence [C], direction of the constant [I].

    L_t = -A r + |A| p (r - 1)^2 / (2 threshold),   r = theta/mu, p = mu(token)

Its gradient weight is r (1 - sign(A) (pi - mu) / threshold): 0 where an outward move reaches |pi - mu| = threshold. The public code's
default of 12.5 makes the penalty nearly inert and looks like the inverse convention; this file keeps DPPO's, a threshold on |pi - mu|.
"""

from __future__ import annotations

from dataclasses import dataclass

from .divergence import Anchor
from .objective import Method, Need, Surrogate, Tokens, pair_needs, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class DRPOConfig(ObjectiveParams):
    """Parameters of `drpo`."""

    threshold: float = 0.15
    """|pi - mu| at which an outward move has no gradient left, a probability [I]."""
    anchor: Anchor = "theta/mu"
    """Which ratio; p is the anchor's probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("threshold", self.threshold > 0, "must be positive; a value near DPPO's 0.15 is meant")


def surrogate(tokens: Tokens, config: DRPOConfig) -> Surrogate:
    """See the module's formula. Metric: the mean of 1 - sign(A) (pi - mu) / threshold."""
    ratio_T = ratio(tokens.live_log_ratio(config.anchor))
    advantages_T = tokens.advantages_T
    anchor_p_T = tokens.logps(config.anchor)[1].exp()
    penalty_T = advantages_T.abs() * anchor_p_T * (ratio_T - 1).square() / (2 * config.threshold)
    left_T = 1 - advantages_T.sign() * anchor_p_T * (ratio_T - 1) / config.threshold
    return Surrogate(penalty_T - advantages_T * ratio_T, {"weight_mean": tokens.average(left_T)})


def _needs(config: DRPOConfig) -> frozenset[Need]:
    return pair_needs(config.anchor)


METHOD = Method(
    name="drpo",
    kind="objective",
    config=DRPOConfig,
    apply=surrogate,
    paper="2606.09821",
    evidence="CI",
    unit="token",
    summary="DPPO's trust region as a quadratic penalty",
    aggregation="seq-mean-token-sum-norm",
    needs=_needs,
)
