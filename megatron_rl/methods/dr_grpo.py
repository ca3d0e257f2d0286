"""Dr. GRPO (papers.md 1.5, 1.6): GRPO without its two normalisations. Evidence [C].

    loss = 1/N sum_i  1/Lmax sum_t  L_t,   L_t as in `ppo`

A constant Lmax replaces each answer's own length, so long wrong answers are not favoured. The other half is the advantage without the
standard deviation: set advantage.params.scale_by_std to false, which this file cannot do for you.
"""

from __future__ import annotations

from dataclasses import dataclass

from .objective import Method
from .ppo import ClipParams, surrogate


@dataclass(frozen=True)
class DrGRPOConfig(ClipParams):
    """Parameters of `dr_grpo`, as PPO's; the dual clip is off."""


METHOD = Method(
    name="dr_grpo",
    kind="objective",
    config=DrGRPOConfig,
    apply=surrogate,
    paper="Dr. GRPO (cited by 2602.04879)",
    evidence="C",
    unit="token",
    summary="GRPO divided by a constant length; use with advantage.params.scale_by_std: false",
    aggregation="seq-mean-token-sum-norm",
    needs=frozenset({"old"}),
)
