"""GMPO (2507.20673): the geometric mean of token ratios, each clipped pessimistically in log space. Evidence [C].

    m_t = sign(A) min( sign(A) l_t, sign(A) clip(l_t, -clip, +clip) ),  l = log theta/old
    J_i = A_i exp( 1/T_i sum_t m_t )

Gradient: A_i w_i / T_i on tokens that are not clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .objective import Method, Surrogate, Tokens, ratio, straight_through
from .params import ObjectiveParams


@dataclass(frozen=True)
class GMPOConfig(ObjectiveParams):
    """Parameters of `gmpo`."""

    clip: float = 0.4
    """Largest |log-ratio| of a token, nats; 0.4 keeps the ratio in (0.67, 1.49)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip", self.clip > 0, "must be positive; the paper's value is 0.4")


def surrogate(tokens: Tokens, config: GMPOConfig) -> Surrogate:
    """See the module's formula."""
    advantages_T = tokens.sequence_advantage_T()
    sign_T = torch.where(advantages_T < 0, -1.0, 1.0)
    log_ratio_T = tokens.log_ratio_T
    clipped_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-config.clip, config.clip))
    weight_S = ratio(tokens.segments.mean(clipped_T.detach()))
    weight_T = straight_through(tokens.segments.spread(weight_S), clipped_T)
    return Surrogate(-advantages_T * weight_T, {"clip_share": tokens.share(clipped_T != log_ratio_T)})


METHOD = Method(
    name="gmpo",
    kind="objective",
    config=GMPOConfig,
    apply=surrogate,
    paper="2507.20673",
    evidence="C",
    unit="sequence",
    summary="Geometric mean of clipped token ratios",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
)
