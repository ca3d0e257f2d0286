"""SORL: SO-PPO and SO-GRPO (2511.20718), turn ratios and clipping-triggered normalisation. Evidence [A][D].

    w_k = ( theta(y^k) / old(y^k) )^(1 / |y^k|)                       geometric mean over turn k
    J   = (1/|y|) sum_k sum_{t in k} PPO's clip of w_k A_t            gradient w_k A_t grad log theta_t where not clipped
    C   = (1/|y|) sum_t 1{t clipped} w_t A_t grad log theta_t         what the clip took away
    g  <- g / max(||C||, c_min)  if any token is clipped              [I]: trigger and floor of v2 were not visible

||C|| needs a second backward, of `Surrogate.clipped_loss_T`, into scratch gradients; `gradient_divisor` turns its norm into the divisor.
The advantage estimator decides the name: GAE gives SO-PPO, group-relative SO-GRPO.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .objective import Method, Surrogate, Tokens, ratio, straight_through
from .ppo import ClipParams, clipped_surrogate


@dataclass(frozen=True)
class SORLConfig(ClipParams):
    """Parameters of `sorl`."""

    c_min: float = 1.0
    """Floor of the divisor [I]; at 1 the rule only shrinks updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("c_min", self.c_min > 0, "must be positive; 1 lets the rule only shrink updates")


def surrogate(tokens: Tokens, config: SORLConfig) -> Surrogate:
    """See the module's formula; clipped_loss_T is -1{clipped} sg[w A] log theta, so loss_T and it add up to the unclipped gradient."""
    turn_T = ratio(tokens.segments.turn_mean(tokens.detached_log_ratio("theta/old")))
    loss_T, metrics = clipped_surrogate(straight_through(turn_T, tokens.logp_T), tokens.advantages_T, tokens, config)
    unclipped_T = -turn_T * tokens.advantages_T
    clipped_T = loss_T.detach() != unclipped_T
    clipped_loss_T = torch.where(clipped_T, unclipped_T, 0.0) * tokens.logp_T
    return Surrogate(loss_T, {**metrics, "clip_share": tokens.share(clipped_T)}, clipped_loss_T)


def gradient_divisor(clipped_gradient_norm: float, config: SORLConfig) -> float:
    """What the step's gradient is divided by, given ||C||; 1 when nothing was clipped."""
    return max(clipped_gradient_norm, config.c_min) if clipped_gradient_norm > 0 else 1.0


METHOD = Method(
    name="sorl",
    kind="objective",
    config=SORLConfig,
    apply=surrogate,
    paper="2511.20718",
    evidence="AD",
    unit="turn",
    summary="Turn-level ratio, gradient divided by the norm of what the clip took away",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old", "turns"}),
    gradient_divisor=gradient_divisor,
)
