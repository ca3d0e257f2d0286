"""Length-triggered learning rate (2602.01826): halve it periodically once answers surge. Evidence [D]; trigger constants of a port.

    len_k  mean answer length of step k          baseline  mean of len over the first baseline_steps
    surge  first step k_s > max(baseline_steps, cooldown) with len_k > surge * baseline
    period P = period * k_s                      a surge at 110 gives 198
    factor max(floor, 0.5^(steps done / P))      1 before the surge

The factor 1.8, the halving and the floor agree across descriptions; surge, window and cooldown are a third-party port's. Where the first
period starts is left open; here at step 0 [I]: a surge at 110 halves at 198, not at 308. The factor multiplies the scheduled learning rate.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .objective import Method
from .params import MethodParams


@dataclass(frozen=True)
class LengthLRConfig(MethodParams):
    """Parameters of `length_lr`."""

    surge: float = 3.0
    """A mean length above this multiple of the baseline is a surge."""
    baseline_steps: int = 50
    """The baseline is the mean length of so many first steps."""
    cooldown: int = 50
    """Steps before a surge counts."""
    period: float = 1.8
    """The halving period is this times the surge step (surge at 110: every 198 steps)."""
    floor: float = 0.1
    """Smallest factor of the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("surge", self.surge > 1, "must exceed 1, or ordinary lengths would count as a surge")
        self.require("baseline_steps", self.baseline_steps >= 1, "must be at least 1")
        self.require("cooldown", self.cooldown >= 0, "must not be negative")
        self.require("period", self.period > 0, "must be positive; the paper's value is 1.8")
        self.require("floor", 0 < self.floor <= 1, "must be in (0, 1]; the paper's value is 0.1")


@dataclass(frozen=True)
class LengthLRState:
    """Where the schedule stands; goes in the checkpoint."""

    step: int = 0
    """Steps observed."""
    length_sum: float = 0.0
    """Sum of mean lengths over the baseline window, tokens."""
    surge_step: int | None = None
    """1-based step of the surge, once there was one."""


def length_lr(state: LengthLRState, mean_length: float, config: LengthLRConfig) -> tuple[LengthLRState, float]:
    """One step: the new state and the factor for the step that follows.

    Args:
        mean_length: of the step's answers in loss tokens, truncated ones included, over all ranks.
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
    halvings = step // max(1, round(config.period * surge_step))
    return state, max(config.floor, 0.5**halvings)


METHOD = Method(
    name="length_lr",
    kind="schedule",
    config=LengthLRConfig,
    apply=None,
    paper="2602.01826",
    evidence="DI",
    unit="step",
    summary="Halves the learning rate periodically once answers have become much longer",
)
