"""Supervised next-token loss: L_t = -log theta(label). It warm-starts a policy on the same data path that RL uses."""

from __future__ import annotations

from dataclasses import dataclass

from .objective import Method, Surrogate, Tokens
from .params import ObjectiveParams


@dataclass(frozen=True)
class NLLConfig(ObjectiveParams):
    """`nll` has no parameters."""


def surrogate(tokens: Tokens, config: NLLConfig) -> Surrogate:
    """See the module's formula; metric `nll` in nats a token."""
    return Surrogate(-tokens.logp_T, {"nll": tokens.average(-tokens.logp_T)})


METHOD = Method(
    name="nll",
    kind="objective",
    config=NLLConfig,
    apply=surrogate,
    paper="maximum likelihood",
    evidence="F",
    unit="token",
    summary="Supervised cross entropy, for the warm start",
    aggregation="token-mean",
)
