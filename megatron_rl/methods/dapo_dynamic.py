"""DAPO, Decoupled Clip and Dynamic sAmpling (2503.14476), the loss: PPO with a higher upper bound, token-mean, no KL. Evidence [D][C].

Not to be confused with Direct Advantage Policy Optimization (2412.18279), which bears the same acronym. The rest of the method lives
where it acts: data methods `overlong` for the reward and `dynamic_sampling` for the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from .objective import Method
from .ppo import ClipParams, surrogate


@dataclass(frozen=True)
class DAPODynamicConfig(ClipParams):
    """Parameters of `dapo_dynamic`, as PPO's."""

    clip_high: float = 0.28
    """Upper distance of the ratio from 1; "clip higher"."""


METHOD = Method(
    name="dapo_dynamic",
    kind="objective",
    config=DAPODynamicConfig,
    apply=surrogate,
    paper="2503.14476",
    evidence="DC",
    unit="token",
    summary="PPO's clip with a higher upper bound, mean over all tokens",
    aggregation="token-mean",
    needs=frozenset({"old"}),
)
