"""GSPO-token (2507.18071): GSPO's sequence ratio with an advantage for each token. Evidence [F].

    s_it = sg[s_i] * theta_t / sg[theta_t]
    J    = 1/G sum_i 1/T_i sum_t min( s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it )

Equals `gspo` when all tokens of a sequence share their advantage.
"""

from __future__ import annotations

from .gspo import GSPOConfig, sequence_ratio_T
from .objective import Method, Surrogate, Tokens
from .ppo import clipped_surrogate


def surrogate(tokens: Tokens, config: GSPOConfig) -> Surrogate:
    """See the module's formula."""
    loss_T, metrics = clipped_surrogate(sequence_ratio_T(tokens), tokens.advantages_T, tokens, config)
    return Surrogate(loss_T, metrics)


METHOD = Method(
    name="gspo_token",
    kind="objective",
    config=GSPOConfig,
    apply=surrogate,
    paper="2507.18071",
    evidence="F",
    unit="sequence",
    summary="GSPO's sequence ratio with token advantages",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
)
