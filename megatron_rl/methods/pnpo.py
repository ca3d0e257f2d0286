"""PNPO (2608.01418): the causal geometric mean of the ratios so far. Evidence [D] for the ratio, [I] for clip and gradient.

    w_t = exp( 1/t sum_{i<=t} l_i ),  l = log theta/old             GSPO's ratio at t = T, the token's at t = 1

Not the paper's, but inferred: the gradient passes through the own token only, the clip is PPO's minimum with log-space bounds that shrink
as t^-0.5, and there is a dual clip, as a public repository does for the same ratio; the aggregation is assumed to be token-mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ctpo import PrefixClipParams, clamped_log_ratio_T, prefix_clipped
from .objective import Method, Surrogate, Tokens


@dataclass(frozen=True)
class PNPOConfig(PrefixClipParams):
    """Parameters of `pnpo` [I]."""

    power: float = -0.5
    """Growth of the window with t; a mean over t tokens narrows as t^-0.5."""


def surrogate(tokens: Tokens, config: PNPOConfig) -> Surrogate:
    """See the module's formula."""
    total_T = tokens.segments.prefix_sum(clamped_log_ratio_T(tokens))
    mean_T = total_T / tokens.segments.prefix_count().clamp(min=1).to(total_T.dtype)
    loss_T, metrics = prefix_clipped(mean_T, tokens, config)
    return Surrogate(loss_T, metrics)


METHOD = Method(
    name="pnpo",
    kind="objective",
    config=PNPOConfig,
    apply=surrogate,
    paper="2608.01418",
    evidence="DI",
    unit="prefix",
    summary="Prefix geometric mean of ratios (clip and gradient path inferred)",
    aggregation="token-mean",
    needs=frozenset({"old"}),
)
