"""GSPO (2507.18071): one length-normalised ratio a sequence, clipped as a whole. Evidence [F].

    s_i = exp( 1/T_i sum_t l_t ),  l = log theta/old
    J   = 1/G sum_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

The gradient is s_i A_i (1/T_i) sum_t grad log theta_t, and zero for the whole sequence when it is clipped outward. It is written here
as GSPO-token with the sequence's one advantage, which has the same gradient and takes none through the sum over a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .objective import Method, Surrogate, Tokens, ratio, straight_through
from .ppo import ClipParams, clipped_surrogate


@dataclass(frozen=True)
class GSPOConfig(ClipParams):
    """Parameters of `gspo` and `gspo_token`. The bounds are far tighter than PPO's because the ratio is a mean."""

    clip_low: float = 3e-4
    """Lower distance of the sequence ratio from 1."""
    clip_high: float = 4e-4
    """Upper distance of the sequence ratio from 1."""


def sequence_ratio_T(tokens: Tokens) -> Tensor:
    """[T] s_i at each token of sequence i, with the gradient of the token's own log-prob."""
    s_S = ratio(tokens.segments.mean(tokens.log_ratio_T.detach()))
    return straight_through(tokens.segments.spread(s_S), tokens.logp_T)


def surrogate(tokens: Tokens, config: GSPOConfig) -> Surrogate:
    """See the module's formula."""
    loss_T, metrics = clipped_surrogate(sequence_ratio_T(tokens), tokens.sequence_advantage_T(), tokens, config)
    return Surrogate(loss_T, metrics)


METHOD = Method(
    name="gspo",
    kind="objective",
    config=GSPOConfig,
    apply=surrogate,
    paper="2507.18071",
    evidence="F",
    unit="sequence",
    summary="Clipped length-normalised sequence ratio",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
)
