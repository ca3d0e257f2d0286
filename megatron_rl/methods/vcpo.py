"""VCPO's learning rate (2602.17616): smaller steps the fewer sequences carry the importance weights. Evidence [D].

    share  = (sum_i w_i)^2 / (B sum_i w_i^2)                  w_i: un-clipped weight of sequence i, a product over its tokens
    factor = min( 1, sqrt(share / reference_share) )          reference_share: that of an on-policy step

The factor multiplies the scheduled learning rate. Only the learning-rate rule: the paper's off-policy optimal baseline needs the gradient
norm of every sequence and is not here; its truncation at 8 is correction `tis`, level sequence, cap 8. The reference, when not given, is
the share of the first step [I]; the cap at 1 is inferred as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .objective import Method
from .params import MethodParams


@dataclass(frozen=True)
class VCPOConfig(MethodParams):
    """Parameters of `vcpo`."""

    reference_share: float | None = None
    """Effective share of an on-policy step, in (0, 1]; null takes the first step's."""
    floor: float = 0.0
    """Smallest factor of the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.reference_share is None or 0 < self.reference_share <= 1
        self.require("reference_share", fits, "must be in (0, 1], or null to take the first step's")
        self.require("floor", 0 <= self.floor <= 1, "must be in [0, 1]; 0 for none")


@dataclass(frozen=True)
class VCPOState:
    """What goes in the checkpoint."""

    reference_share: float | None = None
    """The first step's effective share, once there was one."""


def effective_share(log_weights: Sequence[float]) -> float:
    """(sum w)^2 / (B sum w^2) in (0, 1], from the logs of the weights of all B sequences of the step, over all ranks.

    The largest weight is divided out first, so that no product of thousands of ratios overflows.

    Raises:
        ValueError: no sequence, or a weight that is not a number.
    """
    if not log_weights or not all(math.isfinite(x) for x in log_weights):
        raise ValueError("log_weights: needs one finite number a sequence; sequences without loss tokens have none")
    largest = max(log_weights)
    weights = [math.exp(x - largest) for x in log_weights]
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def vcpo(state: VCPOState, log_weights: Sequence[float], config: VCPOConfig) -> tuple[VCPOState, float, float]:
    """One step: (the new state, the factor for this step's update, the effective share).

    Args:
        log_weights: for each sequence of the step, over all ranks, the sum of its tokens' log old - log mu.
    """
    share = effective_share(log_weights)
    reference = config.reference_share or state.reference_share or share
    return VCPOState(state.reference_share or share), max(config.floor, min(1.0, math.sqrt(share / reference))), share


METHOD = Method(
    name="vcpo",
    kind="schedule",
    config=VCPOConfig,
    apply=None,
    paper="2602.17616",
    evidence="DI",
    unit="step",
    summary="Learning rate times the root of the effective share of importance-weighted sequences",
    needs=frozenset({"recomputed_old"}),
)
