"""A KL penalty inside the reward instead of the loss (papers.md 1.3): PPO with a frozen reference, as in RLHF. Evidence [C].

    r_t <- r_t - beta k_t,    d = log ref - log old,   k1 = -d   k2 = d^2/2   k3 = e^d - 1 - d

Unlike in a loss (`kl_penalty`), k1 is unbiased here: the policy gradient of the reward -beta k1 is that of -beta KL(pi || ref). With token
advantages (`gae`) each token gets its own; with one advantage a trajectory (`group`) their sum is added to the answer's reward. old is the
trainer's policy at the start of the step. Runs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .objective import Method
from .params import MethodParams
from .tokens import LOG_RATIO_LIMIT


@dataclass(frozen=True)
class KLInRewardConfig(MethodParams):
    """Parameters of `kl_in_reward`."""

    beta: float = 1e-3
    """Weight of the penalty, in units of the reward per nat."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The form of the sample estimate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta", self.beta >= 0, "must not be negative; the usual value is 1e-3")


def kl_in_reward(
    old_logp_N: NDArray[Any], reference_logp_N: NDArray[Any], mask_N: NDArray[np.bool_], config: KLInRewardConfig
) -> NDArray[np.float32]:
    """[N] what each token adds to the reward; 0 where mask is False, whatever stands there.

    Args:
        old_logp_N: log-prob under the trainer's policy at the start of the step, nats.
        reference_logp_N: under the frozen reference.
    """
    d_N = np.zeros(len(mask_N))
    gap = reference_logp_N[mask_N].astype(np.float64) - old_logp_N[mask_N].astype(np.float64)
    d_N[mask_N] = np.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    kl_N = {"k1": -d_N, "k2": d_N**2 / 2, "k3": np.expm1(d_N) - d_N}[config.estimator]
    return (-config.beta * kl_N).astype(np.float32)


METHOD = Method(
    name="kl_in_reward",
    kind="data",
    config=KLInRewardConfig,
    apply=None,
    paper="2402.03300",
    evidence="C",
    unit="token",
    summary="Subtracts beta times a KL estimate to a frozen reference from the reward",
    needs=frozenset({"reference", "recomputed_old"}),
)
