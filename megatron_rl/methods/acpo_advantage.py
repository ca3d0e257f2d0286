"""Advantage Clipped Policy Optimization (2609.36816; not the adaptive clip of 2606.22570). Evidence [D].

    J_t = clip( r_t A_t, -alpha, +alpha ),   r = theta/old

The product is clipped and nothing else, so the gradient is 0 where |r A| > alpha, in either direction: a large ratio on a negative
advantage loses its corrective gradient too. alpha presumes advantages divided by the group's standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

from .objective import Method, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class ACPOAdvantageConfig(ObjectiveParams):
    """Parameters of `acpo_advantage`."""

    alpha: float = 2.0
    """Largest |ratio x advantage|: 3 for Qwen2.5-Math-7B, 2 for Qwen3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("alpha", self.alpha > 0, "must be positive; the paper uses 2 or 3")


def surrogate(tokens: Tokens, config: ACPOAdvantageConfig) -> Surrogate:
    """See the module's formula."""
    product_T = ratio(tokens.log_ratio_T) * tokens.advantages_T
    return Surrogate(-product_T.clamp(-config.alpha, config.alpha), {"clip_share": tokens.share(product_T.abs() > config.alpha)})


METHOD = Method(
    name="acpo_advantage",
    kind="objective",
    config=ACPOAdvantageConfig,
    apply=surrogate,
    paper="2609.36816",
    evidence="D",
    unit="token",
    summary="Clips ratio times advantage",
    aggregation="token-mean",
    needs=frozenset({"old"}),
)
