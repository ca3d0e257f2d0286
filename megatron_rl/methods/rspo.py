"""RSPO, router-shift policy optimisation (2510.23027): trust a token less the more its router moved. Evidence [D].

    delta_tl = mean over e in E_old of | log s_theta(e) - log s_old(e) |        E_old: experts of the old forward, s: router scores
    gamma_t  = max( exp( -mean_l delta_tl ), gamma_min )                        detached, in (0, 1], 1 when routing did not move
    the ratio of the base method becomes  gamma_t theta_t / old_t               before clipping and aggregation

Published on top of GMPO, also as a plug-in for GRPO and GSPO. The value of gamma_min is not confirmed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import gmpo, grpo, gspo
from .objective import Method, Surrogate, Tokens
from .params import ObjectiveParams, build

BASES = {module.METHOD.name: module.METHOD for module in (gmpo, grpo, gspo)}


@dataclass(frozen=True)
class RSPOConfig(ObjectiveParams):
    """Parameters of `rspo`."""

    gamma_min: float = 0.5
    """Smallest trust weight; the paper's value is not confirmed."""
    base: Literal["gmpo", "grpo", "gspo"] = "gmpo"
    """Whose ratio is weighted."""
    base_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the base."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("gamma_min", 0 < self.gamma_min <= 1, "must be in (0, 1]; 1 switches the weight off")
        self.base_config()

    def base_config(self) -> Any:
        """The base's own validated parameters."""
        return build(BASES[self.base].config, self.base_params, f"{self.where}.base_params", self.base)


def surrogate(tokens: Tokens, config: RSPOConfig) -> Surrogate:
    """See the module's formula. Metrics: the base's, and the mean trust weight."""
    assert tokens.router_shift_T is not None, "the loop must provide what Stack.needs names"
    gamma_T = (-tokens.router_shift_T).exp().clamp(min=config.gamma_min)
    # gamma multiplies the ratio: in log space it is taken off the old log-prob.
    trusted = dataclasses.replace(tokens, old_logp_T=tokens.old_logp_T - gamma_T.log())
    base: Surrogate = BASES[config.base].apply(trusted, config.base_config())
    return Surrogate(base.loss_T, {**base.metrics, "trust_mean": tokens.average(gamma_T)})


METHOD = Method(
    name="rspo",
    kind="objective",
    config=RSPOConfig,
    apply=surrogate,
    paper="2510.23027",
    evidence="D",
    unit="layer",
    summary="Ratio weighted by how little the token's routing scores moved",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old", "router_shift"}),
)
