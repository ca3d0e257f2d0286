"""GRPO (2402.03300): PPO's clipped surrogate, group advantages, mean over the tokens of each answer first. Evidence [C].

The group-relative advantage itself is advantage `group`; this file is the loss. The optional beta * k3(theta || ref) is the
penalty `kl_penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .objective import Method
from .ppo import ClipParams, surrogate


@dataclass(frozen=True)
class GRPOConfig(ClipParams):
    """Parameters of `grpo`, as PPO's; the dual clip is off, as published."""


METHOD = Method(
    name="grpo",
    kind="objective",
    config=GRPOConfig,
    apply=surrogate,
    paper="2402.03300",
    evidence="C",
    unit="token",
    summary="PPO's clip on group-relative advantages, mean over tokens then answers",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
)
