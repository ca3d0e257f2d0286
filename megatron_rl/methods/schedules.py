"""Learning rates that react to the run: (state, observation) -> (state, factor). Pure functions.

The state is a dataclass that goes in the checkpoint. A factor multiplies the scheduled learning rate. Decide on one rank and broadcast.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .params import Params


def warmup_factor(step: int, steps: int) -> float:
    """Linear from 1/steps at step 0 to 1 at step steps - 1; 1 throughout without warm-up."""
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


@dataclass(frozen=True)
class LengthDecayConfig(Params):
    """The length-triggered schedule of 2602.01826, evidence [D]; trigger, window and cooldown are a third-party port's."""

    surge: float = 3.0
    """A mean length above this multiple of the baseline is a surge."""
    baseline_steps: int = 50
    """The baseline is the mean length of so many first steps."""
    cooldown: int = 50
    """Steps before a surge counts."""
    period: float = 1.8
    """The halving period is this times the surge step (surge at 110: every 198 steps)."""
    floor: float = 0.1
    """Smallest factor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("surge", self.surge > 1, "must exceed 1, or ordinary lengths would count as a surge")
        self.require("baseline_steps", self.baseline_steps >= 1, "must be at least 1")
        self.require("period", self.period > 0, "must be positive; the paper's value is 1.8")
        self.require("floor", 0 < self.floor <= 1, "must be in (0, 1]; the paper's value is 0.1")


@dataclass(frozen=True)
class LengthDecayState:
    """Where the schedule stands."""

    step: int = 0
    """Steps observed."""
    length_sum: float = 0.0
    """Sum of mean lengths over the baseline window."""
    surge_step: int | None = None
    """1-based step of the surge, once there was one."""


def length_decay(state: LengthDecayState, mean_length: float, config: LengthDecayConfig) -> tuple[LengthDecayState, float]:
    """One step: the new state and the factor for the step that follows.

    Args:
        mean_length: mean response length of the batch in loss tokens, truncated answers included, over all ranks.
    """
    step = state.step + 1
    length_sum = state.length_sum + (mean_length if step <= config.baseline_steps else 0.0)
    surge_step = state.surge_step
    watching = surge_step is None and step > max(config.baseline_steps, config.cooldown)
    if watching and mean_length > config.surge * length_sum / config.baseline_steps:
        surge_step = step
    state = dataclasses.replace(state, step=step, length_sum=length_sum, surge_step=surge_step)
    if surge_step is None:
        return state, 1.0
    # The papers' descriptions leave open where the first period starts; here it is step 0: a surge at 110 halves at step 198 [I].
    halvings = step // max(1, round(config.period * surge_step))
    return state, max(config.floor, 0.5**halvings)


def effective_share(log_weights: list[float]) -> float:
    """(sum w)^2 / (B sum w^2) in (0, 1] of un-clipped sequence weights, from their logs."""
    if not log_weights:
        raise ValueError("log_weights: there is none; give one a sequence")
    largest = max(log_weights)
    weights = [math.exp(x - largest) for x in log_weights]
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def vcpo_factor(share: float, reference_share: float = 1.0) -> float:
    """VCPO (2602.17616, evidence [C]): sqrt of the effective share relative to an on-policy step's, at most 1."""
    if not 0 < reference_share <= 1:
        raise ValueError(f"reference_share: {reference_share} must be in (0, 1]; an on-policy step measures it")
    return min(1.0, math.sqrt(share / reference_share))
