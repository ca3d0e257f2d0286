"""SAPO (2511.20347): a sigmoid gate instead of a clip. Evidence [D].

    J_t = (4 / tau) sigmoid( tau (r_t - 1) ) A_t,   tau = tau_pos for A > 0, tau_neg otherwise,  r = theta/old

Gradient weight 4 s (1 - s) r on A grad log theta: 1 at r = 1, falling on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .objective import Method, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class SAPOConfig(ObjectiveParams):
    """Parameters of `sapo`."""

    tau_pos: float = 1.0
    """Steepness of the gate for A > 0."""
    tau_neg: float = 1.05
    """Steepness of the gate for A <= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau_pos", "tau_neg"):
            self.require(name, getattr(self, name) > 0, "must be positive; the paper's values are 1.0 and 1.05")


def surrogate(tokens: Tokens, config: SAPOConfig) -> Surrogate:
    """See the module's formula. Metric: the mean gradient weight."""
    ratio_T = ratio(tokens.log_ratio_T)
    tau_T = torch.where(tokens.advantages_T > 0, config.tau_pos, config.tau_neg).to(ratio_T.dtype)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    return Surrogate(-4 / tau_T * gate_T * tokens.advantages_T, {"weight_mean": tokens.average(4 * gate_T * (1 - gate_T) * ratio_T)})


METHOD = Method(
    name="sapo",
    kind="objective",
    config=SAPOConfig,
    apply=surrogate,
    paper="2511.20347",
    evidence="D",
    unit="token",
    summary="Sigmoid gate of the token ratio",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
)
