"""MIPU (2606.29526): keep an optimizer step only if it improves the policy that the engine samples from. Evidence [D]; T-hat [I].

    J(mu') - J(mu) = [ J(mu') - J(pi') ] + [ J(pi') - J(pi) ] + [ J(pi) - J(mu) ]           ' = with the candidate weights
    step 1  min(old/mu, 2) times PPO's clipped surrogate: objective `ppo` with correction `tis`
    step 2  sync the candidate to the engine, sample validation answers from mu', score them with the trainer;
            T-hat ~ J(mu') - J(pi'); keep the step iff T-hat >= -c, else restore weights, optimizer, scheduler, RNG and engine

T-hat from samples y ~ mu', d_t = log pi' - log mu' of token t, is the mean of R(y) times
    sequence     1 - exp(sum_t d_t)                 unbiased, but a product of thousands of ratios
    first_order  sum_t (1 - exp(d_t))               the first-order form of papers.md 2.3: biased by O(T^2), far less variance
The paper's own estimator and the schedule of c inside 1e-4 .. 8e-4 were not visible. Published rollback rate: about 53 %. Random rollbacks
at 67 % collapse, hence the bound on consecutive ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .objective import Method
from .params import MethodParams
from .tokens import LOG_RATIO_LIMIT


@dataclass(frozen=True)
class MIPUConfig(MethodParams):
    """Parameters of `mipu`."""

    tolerance_start: float = 8e-4
    """c at the first step, in units of the reward."""
    tolerance_end: float = 1e-4
    """c once annealed."""
    anneal_steps: int = 100
    """Steps over which c goes linearly from start to end [I]."""
    prompts: int = 32
    """Validation prompts a step."""
    samples: int = 4
    """Answers to each."""
    estimator: Literal["sequence", "first_order"] = "first_order"
    """Form of T-hat [I]."""
    max_consecutive_rollbacks: int = 5
    """After so many in a row the next step is kept whatever its T-hat [I]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tolerance_start", "tolerance_end"):
            self.require(name, getattr(self, name) >= 0, "must not be negative; the paper's values lie in 1e-4 .. 8e-4")
        self.require("anneal_steps", self.anneal_steps >= 1, "must be at least 1")
        self.require("prompts", self.prompts >= 1, "must be at least 1")
        self.require("samples", self.samples >= 1, "must be at least 1")
        self.require("max_consecutive_rollbacks", self.max_consecutive_rollbacks >= 1, "must be at least 1, or every step would be kept")


@dataclass(frozen=True)
class MIPUState:
    """What goes in the checkpoint."""

    steps: int = 0
    """Decisions taken."""
    consecutive_rollbacks: int = 0
    """Rollbacks since the last step that was kept."""
    rollbacks: int = 0
    """Rollbacks of the whole run."""


@dataclass(frozen=True)
class Verdict:
    """One decision."""

    accepted: bool
    forced: bool
    """Kept only because of max_consecutive_rollbacks."""
    gap: float
    """T-hat, in units of the reward."""
    tolerance: float
    """c."""


def gap_terms(rewards_S: Sequence[float], log_ratios: Sequence[NDArray[Any]], config: MIPUConfig) -> NDArray[np.float64]:
    """[S] the summands whose mean is T-hat ~ J(mu') - J(pi'), in units of the reward. Gather them from all leaders before the mean.

    Args:
        rewards_S: of the validation answers.
        log_ratios: for each answer, [n] log pi' - log mu' of its loss tokens; both under the candidate weights.
    """
    assert len(rewards_S) == len(log_ratios)

    def shortfall(d_n: NDArray[Any]) -> float:
        exponent = d_n.astype(np.float64).sum(keepdims=True) if config.estimator == "sequence" else d_n.astype(np.float64)
        return -float(np.expm1(np.clip(exponent, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum())

    return np.array([r * shortfall(d_n) for r, d_n in zip(rewards_S, log_ratios, strict=True)], dtype=np.float64)


def tolerance(step: int, config: MIPUConfig) -> float:
    """c at that step, counted from 0."""
    done = min(1.0, step / config.anneal_steps)
    return config.tolerance_start + done * (config.tolerance_end - config.tolerance_start)


def accept(gap: float, c: float) -> bool:
    """Whether the step is kept. A gap that is not a number is not."""
    return gap >= -c


def decide(state: MIPUState, gap: float, config: MIPUConfig) -> tuple[MIPUState, Verdict]:
    """One step: the new state, which a rollback must not restore, and the verdict."""
    c = tolerance(state.steps, config)
    good = accept(gap, c)
    forced = not good and state.consecutive_rollbacks >= config.max_consecutive_rollbacks
    accepted = good or forced
    consecutive = 0 if accepted else state.consecutive_rollbacks + 1
    return MIPUState(state.steps + 1, consecutive, state.rollbacks + (not accepted)), Verdict(accepted, forced, gap, c)


METHOD = Method(
    name="mipu",
    kind="step",
    config=MIPUConfig,
    apply=None,
    paper="2606.29526",
    evidence="DI",
    unit="step",
    summary="Rolls back a step that the engine's policy does not profit from",
    needs=frozenset({"recomputed_old"}),
)
