"""SIS (2607.04728): accept stale tokens as if the current policy had drawn them, as speculative decoding does. Evidence [D].

    w_t  = theta(a_t) / old(a_t)
    Mhat = max over v in TopK(old) of theta(v) / old(v)             exact when K = V
    a_t in TopK(old) and u_t < w_t / Mhat:  the ratio becomes 1, gradient A grad log theta
    otherwise:                              PPO's clipped ratio, the base method

With the exact envelope, accepted tokens are distributed as theta and the acceptance rate is 1 / Mhat. One uniform a token. K is not
stated in the accessible text; a third-party port uses 10. Where another method of the stack wants more candidates, the envelope is over
those.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ppo
from .objective import Method, Surrogate, Tokens, ratio


@dataclass(frozen=True)
class SISConfig(ppo.ClipParams):
    """Parameters of `sis`: its own and those of its base, PPO's clip."""

    candidates: int = 10
    """K of TopK(old); the paper's value is not confirmed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("candidates", self.candidates >= 1, "must be at least 1; a port uses 10")


def accepted_T(tokens: Tokens) -> Tensor:
    """[T] bool, which tokens count as drawn by theta."""
    assert tokens.uniform_T is not None, "the loop must provide what Stack.needs names"
    top_k = tokens.top_k("theta/old")
    envelope_T = (top_k.logp_TK - top_k.base_logp_TK).amax(dim=1)
    chance_T = ratio(tokens.detached_log_ratio("theta/old") - envelope_T)
    return top_k.has_label_T & (tokens.uniform_T < chance_T)


def surrogate(tokens: Tokens, config: SISConfig) -> Surrogate:
    """See the module's formula. Metrics: the base's, and the share of accepted tokens."""
    accept_T = accepted_T(tokens)
    # An accepted token's old log-prob becomes theta's own: its ratio is then theta / sg[theta], value 1 with the full gradient.
    on_policy = dataclasses.replace(tokens, old_logp_T=torch.where(accept_T, tokens.logp_T.detach(), tokens.old_logp_T))
    base = ppo.surrogate(on_policy, config)
    return Surrogate(base.loss_T, {**base.metrics, "accepted_share": tokens.share(accept_T)})


METHOD = Method(
    name="sis",
    kind="objective",
    config=SISConfig,
    apply=surrogate,
    paper="2607.04728",
    evidence="D",
    unit="token",
    summary="Stale tokens accepted by rejection sampling become on-policy; PPO for the rest",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"recomputed_old", "old_top_k", "uniform"}),
    candidates=lambda config: int(config.candidates),
)
