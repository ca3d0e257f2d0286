"""Group-relative advantages: GRPO (2402.03300), Dr. GRPO, RLOO (papers.md 1.6). Evidence [C].

    mean           A_i = R_i - mean of the group                                 GRPO, Dr. GRPO
    leave-one-out  A_i = R_i - mean of the other members = n/(n-1) (R_i - mean)  RLOO
    scale_by_std   A_i / (std of the group + eps)                                GRPO; without it Dr. GRPO, DPPO

std: GRPO's written formula divides by the group's own deviation, read here as the population's (divisor n), the default; verl and TRL
divide by the sample's (divisor n - 1), which makes |A| smaller by sqrt((n-1)/n). One advantage a trajectory: all its loss tokens share it.
A group whose rewards are all equal gets exactly 0, as does a group of one. Rejected samples (truncated, aborted) get 0 and leave their
group's statistics. Runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from .objective import Method
from .params import MethodParams


@dataclass(frozen=True)
class GroupConfig(MethodParams):
    """Parameters of `group`."""

    where: ClassVar[str] = "advantage.params"

    baseline: Literal["mean", "leave-one-out"] = "mean"
    """What is subtracted: the group's mean, or the mean of the other members."""
    scale_by_std: bool = True
    """Divide by the group's standard deviation."""
    std: Literal["population", "sample"] = "population"
    """Its divisor: n (2402.03300 as written) or n - 1 (verl, TRL)."""
    eps: float = 1e-6
    """Added to the deviation, in units of the reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("eps", self.eps >= 0, "must not be negative; the usual value is 1e-6")


def group_advantages(
    rewards: Sequence[float], groups: Sequence[str], config: GroupConfig, valid: Sequence[bool] | None = None
) -> NDArray[np.float32]:
    """[n] advantages.

    Args:
        rewards: one a trajectory.
        groups: the group each trajectory belongs to; members need not be adjacent.
        valid: False takes a trajectory out of its group; its advantage is 0 and its reward is not looked at. None keeps all.

    Raises:
        ValueError: lists of different lengths, or a reward that is not finite.
    """
    keep = np.ones(len(rewards), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    if not len(rewards) == len(groups) == len(keep):
        raise ValueError(f"rewards: {len(rewards)} values for {len(groups)} groups and {len(keep)} verdicts; give one of each a trajectory")
    reward = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(reward[keep]).all():
        first = int(np.flatnonzero(keep & ~np.isfinite(reward))[0])
        raise ValueError(f"rewards[{first}]: {reward[first]} is not finite; mend the verifier or mark the trajectory as not valid")
    advantages = np.zeros(len(reward), dtype=np.float64)
    names = np.asarray(groups)
    for name in np.unique(names[keep]):
        member = keep & (names == name)
        advantages[member] = _one_group(reward[member], config)
    return advantages.astype(np.float32)


def _one_group(reward: NDArray[np.float64], config: GroupConfig) -> NDArray[np.float64]:
    n = len(reward)
    if np.ptp(reward) == 0:  # the mean of equal numbers can miss them by rounding, and 0/eps would enlarge that
        return np.zeros(n)
    centred = reward - reward.mean()
    if config.baseline == "leave-one-out":
        centred = centred * n / (n - 1)
    if config.scale_by_std:
        centred = centred / (reward.std(ddof=0 if config.std == "population" else 1) + config.eps)
    return centred


METHOD = Method(
    name="group",
    kind="advantage",
    config=GroupConfig,
    apply=None,
    paper="2402.03300",
    evidence="C",
    unit="sequence",
    summary="Reward minus the group's mean (or the others'), over its deviation or not",
)
