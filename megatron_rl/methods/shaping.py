"""Rewards and groups before advantages are taken: overlong penalty, dynamic sampling, KL inside the reward. Host side, numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(lengths: Sequence[int], max_length: int, buffer: int) -> NDArray[np.float32]:
    """[n] what an answer's length adds to its reward (DAPO 2503.14476, evidence [D][C]).

    0 up to max_length - buffer tokens, falling linearly to -1 at max_length, -1 beyond. Published: 20480 with a buffer of 4096.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer: {buffer} must be in 1 .. max_length = {max_length}; DAPO's is a fifth of it")
    over = np.asarray(lengths, dtype=np.float64) - (max_length - buffer)
    return np.clip(-over / buffer, -1.0, 0.0).astype(np.float32)


def informative_groups(rewards: Sequence[float], groups: Sequence[str]) -> NDArray[np.bool_]:
    """[n] True for members of groups whose rewards differ: dynamic sampling keeps these and draws on until enough are left.

    DAPO 2503.14476, evidence [D][C]. An all-equal group has advantage 0 and only dilutes the token mean.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"rewards: {len(rewards)} values for {len(groups)} groups; give one group name a reward")
    reward = np.asarray(rewards, dtype=np.float64)
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, member, reward)
    np.maximum.at(high, member, reward)
    keep: NDArray[np.bool_] = (high > low)[member]
    return keep


def kl_in_reward(
    logp: NDArray[np.float32],
    reference_logp: NDArray[np.float32],
    mask: NDArray[np.bool_],
    beta: float,
    estimator: Literal["k1", "k2", "k3"] = "k1",
) -> NDArray[np.float32]:
    """[N] what each token adds to the reward: -beta times the sample estimate of KL(policy || reference); 0 where mask is False.

    Args:
        logp: [N] log-prob under the policy that sampled (or the trainer's old one), nats.
        reference_logp: [N] under the frozen reference.
        estimator: with d = reference - policy: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. Unlike in a loss, k1 is unbiased here.
    """
    d = np.where(mask, np.clip(reference_logp.astype(np.float64) - logp, -20, 20), 0.0)
    kl = {"k1": -d, "k2": d**2 / 2, "k3": np.expm1(d) - d}[estimator]
    return (-beta * kl).astype(np.float32)
