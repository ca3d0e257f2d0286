"""Direct Advantage Policy Optimization, the actor's loss (2412.18279; not ByteDance's DAPO). Evidence [A][D].

    L_k = 1/2 ( log[ theta(a_k|s_k) / base(a_k|s_k) ] - A_k / beta )^2              a_k: step k, one turn id; L = mean over steps
    log[ theta(a|s) / base(a|s) ] = sum over the tokens of the step; gradient ( log-ratio - A_k / beta ) grad log theta(a_k|s_k)

A_k is the step's advantage (`step_advantage`, under the base); here the mean over its tokens. base is pi_ref: old iterates pi_ref <- theta
at every rollout step, reference is the paper's offline form. The optimum is base exp(A / beta) where that is normalised. At theta = base
the gradient is REINFORCE's over beta. No clip and no ratio: corrections of the behaviour gap only reweight the squares.

Per token: its share of L_k in value, the step's coefficient times its own grad log theta in gradient, so sums over a step give the above.
Aggregation: seq-mean-token-sum, the nearest of the four to the mean over steps: every step weighs the same, and the scale differs by the
mini-batch's mean number of steps an answer. token-mean also weighs steps alike, scaled down by the mean tokens of a step;
seq-mean-token-mean does not. beta is not confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..types import as_metric
from .objective import Method, Need, Surrogate, Tokens
from .params import ObjectiveParams


@dataclass(frozen=True)
class DirectAdvantageConfig(ObjectiveParams):
    """Parameters of `direct_advantage`."""

    beta: float = 1.0
    """Advantage per nat of a step's log-ratio: the smaller, the further theta goes. Not confirmed."""
    base: Literal["old", "reference", "mu"] = "old"
    """The policy whose improvement is sought, pi_ref."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta", self.beta > 0, "must be positive; the paper's value is not confirmed, 1 is moderate")


def surrogate(tokens: Tokens, config: DirectAdvantageConfig) -> Surrogate:
    """See the module's formula. Metrics over steps: mean |log-ratio|, and mean |log-ratio - A/beta|."""
    base_T = {"reference": tokens.reference_logp_T, "mu": tokens.behaviour_logp_T, "old": tokens.old_logp_T}[config.base]
    assert base_T is not None, "the loop must provide what Stack.needs names"
    segments, logp_T = tokens.segments, tokens.logp_T
    log_ratio_T = segments.turn_sum(logp_T.detach() - base_T)
    share_T = 1 / segments.turn_sum(torch.ones_like(base_T)).clamp(min=1)
    residual_T = log_ratio_T - segments.turn_mean(tokens.advantages_T) / config.beta
    loss_T = residual_T.square() / 2 * share_T + residual_T * (logp_T - logp_T.detach())
    weight_T = torch.where(tokens.mask_T, share_T, 0.0).double()
    metrics = {
        "log_ratio_abs": as_metric((weight_T * log_ratio_T.abs()).sum(), weight_T.sum()),
        "residual_abs": as_metric((weight_T * residual_T.abs()).sum(), weight_T.sum()),
    }
    return Surrogate(loss_T, metrics)


def _needs(config: DirectAdvantageConfig) -> frozenset[Need]:
    base: dict[str, frozenset[Need]] = {"reference": frozenset({"reference"}), "mu": frozenset(), "old": frozenset({"old"})}
    return base[config.base] | {"turns"}


METHOD = Method(
    name="direct_advantage",
    kind="objective",
    config=DirectAdvantageConfig,
    apply=surrogate,
    paper="2412.18279",
    evidence="AD",
    unit="step",
    summary="Square of a step's log-ratio minus its advantage over beta",
    aggregation="seq-mean-token-sum",
    needs=_needs,
)
