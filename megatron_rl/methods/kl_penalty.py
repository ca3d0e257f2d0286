"""A KL penalty on every loss token (papers.md 1.3, 8.1): GRPO's beta * k3(theta || ref), or prime-rl's squared log-ratio. Evidence [C].

    d_t = log base - log theta
    k1: -d_t      k2: d_t^2 / 2      k3: e^d - 1 - d               L_t += beta * k_t, with its gradient

Read with samples from theta, k1 and k3 estimate KL(theta || base). As a *loss*, k1's gradient is in expectation 0 (its value is right, its
gradient is not), k2's is the gradient of KL(theta || base), k3's that of KL(base || theta). prime-rl's kl_tau * log-ratio^2 is base mu, k2,
beta = 2 kl_tau. Inside the reward, use `kl_in_reward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .estimators import k1, k2, k3
from .objective import Method, Need, Surrogate, Tokens
from .params import CorrectionParams

_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class KLPenaltyConfig(CorrectionParams):
    """Parameters of `kl_penalty`."""

    beta: float = 1e-3
    """Weight of the penalty, per nat."""
    base: Literal["reference", "mu", "old"] = "reference"
    """The policy to stay close to."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The form of the penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta", self.beta >= 0, "must not be negative; the usual value is 1e-3")


def penalise(tokens: Tokens, config: KLPenaltyConfig) -> Surrogate:
    """See the module's formula. Metric `kl`: the estimate in nats a token, before beta."""
    base_T = {"reference": tokens.reference_logp_T, "mu": tokens.behaviour_logp_T, "old": tokens.old_logp_T}[config.base]
    assert base_T is not None, "the loop must provide what Stack.needs names"
    kl_T = _ESTIMATORS[config.estimator](base_T - tokens.logp_T)
    return Surrogate(config.beta * kl_T, {"kl": tokens.average(kl_T)})


def _needs(config: KLPenaltyConfig) -> frozenset[Need]:
    needs: dict[str, frozenset[Need]] = {"reference": frozenset({"reference"}), "mu": frozenset(), "old": frozenset({"old"})}
    return needs[config.base]


METHOD = Method(
    name="kl_penalty",
    kind="penalty",
    config=KLPenaltyConfig,
    apply=penalise,
    paper="2402.03300",
    evidence="C",
    unit="token",
    summary="Adds beta times a KL estimate to a reference, old or behaviour policy",
    needs=_needs,
)
