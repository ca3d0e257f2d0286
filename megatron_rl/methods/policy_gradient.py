"""The policy gradient without any clip or mask: the base on which corrections are measured. Evidence [F] (TRM 2512.23075, 3.1).

weight: none       L_t = -A_t log theta                    REINFORCE; correct only where theta = mu
        theta/mu   L_t = -(theta/mu)_t A_t                 the first-order surrogate L' of papers.md 2.3; TRM masks this one
        theta/old  L_t = -(theta/old)_t A_t                unclipped PPO
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .objective import Method, Need, Surrogate, Tokens, pair_needs, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class PolicyGradientConfig(ObjectiveParams):
    """Parameters of `policy_gradient`."""

    weight: Literal["none", "theta/mu", "theta/old"] = "theta/mu"
    """The ratio that multiplies the advantage."""


def surrogate(tokens: Tokens, config: PolicyGradientConfig) -> Surrogate:
    """See the module's formula."""
    if config.weight == "none":
        return Surrogate(-tokens.advantages_T * tokens.logp_T)
    ratio_T = ratio(tokens.live_log_ratio(config.weight))
    return Surrogate(-ratio_T * tokens.advantages_T, {"ratio_mean": tokens.average(ratio_T)})


def _needs(config: PolicyGradientConfig) -> frozenset[Need]:
    return frozenset() if config.weight == "none" else pair_needs(config.weight)


METHOD = Method(
    name="policy_gradient",
    kind="objective",
    config=PolicyGradientConfig,
    apply=surrogate,
    paper="2512.23075",
    evidence="F",
    unit="token",
    summary="Advantage times log-prob or ratio, nothing clipped; the base for corrections",
    aggregation="seq-mean-token-sum",
    needs=_needs,
)
