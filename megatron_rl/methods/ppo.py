"""PPO's clipped surrogate (1707.06347), with asymmetric bounds (DAPO 2503.14476) and dual clip (papers.md 8.1). Evidence [C].

r_t = theta / old
L_t = -min( r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t ),   for A_t < 0 at most  -dual_clip * A_t
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Metric
from .objective import Method, Surrogate, Tokens, ratio
from .params import ObjectiveParams


@dataclass(frozen=True)
class ClipParams(ObjectiveParams):
    """Bounds of a clipped ratio."""

    clip_low: float = 0.2
    """Lower distance of the ratio from 1."""
    clip_high: float = 0.2
    """Upper distance of the ratio from 1."""
    dual_clip: float | None = None
    """Largest ratio that a negative advantage may push with; null switches it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip_low", 0 <= self.clip_low <= 1, "must be in [0, 1]; the usual value is 0.2, and 1 means no lower bound")
        self.require("clip_high", self.clip_high >= 0, "must not be negative; the usual values are 0.2 and 0.28")
        if self.dual_clip is not None:
            remedy = f"must exceed 1 + clip_high = {1 + self.clip_high}; raise it or set it to null"
            self.require("dual_clip", self.dual_clip > 1 + self.clip_high, remedy)


@dataclass(frozen=True)
class PPOConfig(ClipParams):
    """Parameters of `ppo`."""

    dual_clip: float | None = 3.0
    """Largest ratio that a negative advantage may push with; null switches it off."""


def clipped_surrogate(ratio_T: Tensor, advantages_T: Tensor, tokens: Tokens, config: ClipParams) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's pessimistic minimum at any unit of ratio: (loss [T], metrics)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    metrics = {
        "clip_share_high": tokens.share((advantages_T > 0) & (ratio_T > high)),
        "clip_share_low": tokens.share((advantages_T < 0) & (ratio_T < low)),
    }
    if config.dual_clip is not None:
        bound_T = torch.where(advantages_T < 0, config.dual_clip * advantages_T, -torch.inf)
        metrics["dual_clip_share"] = tokens.share(bound_T > gain_T)
        gain_T = torch.maximum(gain_T, bound_T)
    return -gain_T, metrics


def surrogate(tokens: Tokens, config: ClipParams) -> Surrogate:
    """See the module's formula."""
    loss_T, metrics = clipped_surrogate(ratio(tokens.log_ratio_T), tokens.advantages_T, tokens, config)
    return Surrogate(loss_T, metrics)


METHOD = Method(
    name="ppo",
    kind="objective",
    config=PPOConfig,
    apply=surrogate,
    paper="1707.06347",
    evidence="C",
    unit="token",
    summary="Clipped ratio to the old policy, token by token",
    aggregation="token-mean",
    needs=frozenset({"old"}),
)
