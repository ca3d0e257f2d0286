"""Generalised advantage estimation with a critic (1506.02438), as PPO (1707.06347) uses it. Evidence [C].

    delta_t  = r_t + gamma V_{t+1} - V_t            V_{t+1} = 0 after the last token
    A_t      = sum_{k>=0} (gamma lam)^k delta_{t+k}
    return_t = A_t + V_t                            what the critic is trained towards (`value_loss`)
    whiten:    A_t <- (A_t - mean) / sqrt(variance + 1e-8), over all loss tokens of the step (sample variance, as verl and TRL)

Only loss tokens are time steps: prompts and tool output are skipped and do not discount. V_t is the value of the state *before* token t.
A truncated answer counts as finished, as in verl: nothing is bootstrapped. gamma = lam = 1, the usual choice for verifiable rewards, gives
the Monte-Carlo return minus the critic's value. Runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .objective import Method
from .params import MethodParams

WHITEN_EPS = 1e-8
"""Added to the variance, as in verl and TRL."""


@dataclass(frozen=True)
class GAEConfig(MethodParams):
    """Parameters of `gae`."""

    where: ClassVar[str] = "advantage.params"

    gamma: float = 1.0
    """Discount per loss token."""
    lam: float = 1.0
    """Decay of the trace per loss token: 1 trusts the return, 0 the critic."""
    whiten: bool = True
    """Shift and scale the advantages of the step to mean 0 and variance 1 over all its loss tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("gamma", 0 <= self.gamma <= 1, "must be in [0, 1]; the usual value is 1")
        self.require("lam", 0 <= self.lam <= 1, "must be in [0, 1]; usual values are 1 and 0.95")


def reward_at_end(mask_N: NDArray[np.bool_], reward: float) -> NDArray[np.float64]:
    """[N] the reward of a whole answer, on its last loss token; all 0 where there is none."""
    rewards_N = np.zeros(len(mask_N))
    if mask_N.any():
        rewards_N[np.flatnonzero(mask_N)[-1]] = reward
    return rewards_N


def gae(
    rewards_N: NDArray[Any], values_N: NDArray[Any], mask_N: NDArray[np.bool_], gamma: float, lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """([N] advantages, [N] returns) of one trajectory, both 0 where mask is False.

    Args:
        rewards_N: the reward for sampling token n; not looked at where mask is False.
        values_N: the critic's value of the state before token n; not looked at where mask is False.
        mask_N: the loss mask.
    """
    assert rewards_N.shape == values_N.shape == mask_N.shape
    reward_M, value_M = rewards_N[mask_N].astype(np.float64), values_N[mask_N].astype(np.float64)
    delta_M = reward_M + gamma * np.append(value_M[1:], 0.0)[: len(value_M)] - value_M
    advantage_M = np.zeros_like(delta_M)
    trace = 0.0
    for t in reversed(range(len(delta_M))):
        trace = delta_M[t] + gamma * lam * trace
        advantage_M[t] = trace
    advantages_N, returns_N = np.zeros(len(mask_N), np.float32), np.zeros(len(mask_N), np.float32)
    advantages_N[mask_N], returns_N[mask_N] = advantage_M, advantage_M + value_M
    return advantages_N, returns_N


def moments(advantages: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """[3] count, sum and sum of squares over loss tokens. Additive: sum it over data-parallel leaders before `whiten`."""
    total = np.zeros(3)
    for advantages_N, mask_N in zip(advantages, masks, strict=True):
        x = advantages_N[mask_N].astype(np.float64)
        total += (len(x), x.sum(), np.square(x).sum())
    return total


def whiten(
    advantages: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]], totals: NDArray[np.float64]
) -> list[NDArray[np.float32]]:
    """Each [N] with the mean and variance that `totals` (summed `moments`) has taken out; 0 where mask is False.

    Fewer than two loss tokens in the whole step have no variance: they become 0.
    """
    count, total, square = (float(x) for x in totals)
    mean = total / max(count, 1.0)
    variance = max(square - count * mean**2, 0.0) / max(count - 1, 1.0)
    scale = 1 / np.sqrt(variance + WHITEN_EPS)
    return [np.where(m, (a.astype(np.float64) - mean) * scale, 0.0).astype(np.float32) for a, m in zip(advantages, masks, strict=True)]


METHOD = Method(
    name="gae",
    kind="advantage",
    config=GAEConfig,
    apply=None,
    paper="1506.02438",
    evidence="C",
    unit="token",
    summary="Discounted sum of a critic's temporal differences, one advantage a token",
)
