"""Group-relative advantages (papers.md 1.6). Rewards in, one advantage a trajectory out; numpy, because it runs on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["mean", "leave-one-out"]


def group_advantages(
    rewards: Sequence[float], groups: Sequence[str], *, baseline: Baseline = "mean", scale_by_std: bool = True, eps: float = 1e-6
) -> NDArray[np.float32]:
    """[n] advantages: reward minus the group's baseline, over the group's standard deviation if asked.

    Args:
        rewards: one a trajectory.
        groups: the group each trajectory belongs to; members need not be adjacent.
        baseline: `mean` of the group (GRPO, Dr. GRPO) or the mean of the other members (RLOO).
        scale_by_std: divide by the population standard deviation plus eps (GRPO 2402.03300); False is Dr. GRPO.

    A group whose rewards are all equal gets exactly 0, as does a group of one.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"rewards: {len(rewards)} values for {len(groups)} groups; give one group name a reward")
    reward = np.asarray(rewards, dtype=np.float64)
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    count = np.bincount(member).astype(np.float64)
    mean = np.bincount(member, weights=reward) / count
    centred = reward - mean[member]
    variance = np.bincount(member, weights=centred**2) / count
    if baseline == "leave-one-out":
        centred = centred * count[member] / np.maximum(count[member] - 1, 1)
    if scale_by_std:
        centred = centred / (np.sqrt(variance)[member] + eps)
    flat = np.array([np.ptp(reward[member == g]) == 0 for g in range(len(count))], dtype=bool)
    return np.where(flat[member], 0.0, centred).astype(np.float32)
