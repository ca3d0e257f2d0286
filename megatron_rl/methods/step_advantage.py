"""Step advantages of Direct Advantage Policy Optimization (2412.18279; not ByteDance's DAPO). Evidence [A][D].

    s_k = prompt + steps before k,  a_k = step k of K               a step is a run of loss tokens with one turn id
    A(s_k, a_k) = V(s_{k+1}) - V(s_k),   A(s_{K-1}, a_{K-1}) = R - V(s_{K-1})            R: correctness of the answer
    monte-carlo: V(s) = mean reward of `completions` answers sampled on from s
    learned:     V(s) = the critic's probability of success, trained on its own towards such means (`value_loss`, bce)

The K advantages add up to R - V(prompt). V is the value under the policy that the step started from (pi_ref, iterated). How answers are
cut into steps and how many completions the paper takes are not confirmed. Runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from .objective import Method
from .params import MethodParams


@dataclass(frozen=True)
class StepAdvantageConfig(MethodParams):
    """Parameters of `step_advantage`."""

    where: ClassVar[str] = "advantage.params"

    critic: Literal["monte-carlo", "learned"] = "monte-carlo"
    """Where values come from: completions of every prefix, or a value model that is trained on such completions."""
    completions: int = 4
    """Answers sampled on from each prefix; the paper's number is not confirmed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("completions", self.completions >= 1, "must be at least 1; more give less noisy values")


def step_starts(turns_N: NDArray[np.int32]) -> list[int]:
    """[K] index of the first loss token of each step, in order: state s_k is the trajectory's tokens before it.

    Args:
        turns_N: the step of each loss token, from 0 without gaps and in order; -1 elsewhere.

    Raises:
        ValueError: a step is missing or out of order.
    """
    steps = turns_N[turns_N >= 0]
    count = int(steps.max()) + 1 if len(steps) else 0
    if (np.diff(steps) < 0).any() or len(np.unique(steps)) != count:
        raise ValueError(f"turns: the steps are {np.unique(steps).tolist()}; number them 0, 1, 2, ... in the order of the tokens")
    return [int(np.flatnonzero(turns_N == k)[0]) for k in range(count)]


def monte_carlo_value(rewards: Sequence[float]) -> float:
    """V(s): the mean reward of the completions of s.

    Raises:
        ValueError: there is none.
    """
    if not rewards:
        raise ValueError("rewards: no completion of this prefix; sample at least one")
    return float(np.mean(np.asarray(rewards, dtype=np.float64)))


def step_advantages(values_K: Sequence[float], reward: float) -> NDArray[np.float64]:
    """[K] A of each step, from the K values before them and the answer's reward."""
    return np.diff(np.append(np.asarray(values_K, dtype=np.float64), reward))


def spread_steps(x_K: NDArray[Any], turns_N: NDArray[np.int32]) -> NDArray[np.float32]:
    """[N] each step's number at each of its loss tokens; 0 elsewhere."""
    inside_N = turns_N >= 0
    out_N = np.zeros(len(turns_N), np.float32)
    out_N[inside_N] = np.asarray(x_K)[turns_N[inside_N]]
    return out_N


METHOD = Method(
    name="step_advantage",
    kind="advantage",
    config=StepAdvantageConfig,
    apply=None,
    paper="2412.18279",
    evidence="AD",
    unit="step",
    summary="Difference of the chance of success after and before each reasoning step",
    needs=frozenset({"turns"}),
)
