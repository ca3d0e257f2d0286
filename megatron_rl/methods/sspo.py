"""Soft Sequence Policy Optimization (2602.19327; not Sub-Sentence, 2511.04256). Evidence [A] for the idea, [I] for the gate.

The abstract says: sequence weight = geometric mean over tokens of a soft gate of the token ratio, v1 with a sigmoid, later versions with
an arctan on the log-ratio. The constants below are inferred, not the paper's; the families satisfy 2602.19345 (slope 1 at r = 1, falling).

    coordinate log:    w_i = exp( 1/T_i sum_t g(l_t) )               l = log theta/old
    coordinate ratio:  w_i = exp( 1/T_i sum_t log(1 + g(r_t - 1)) )
    J   = 1/G sum_i w_i A_i
    g(x): arctan  atan(tau x) / tau              sigmoid   4/tau (sigmoid(tau x) - 1/2)
          erf     sqrt(pi)/(2 tau) erf(tau x)    softsign  x / (1 + tau |x|)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .objective import Method, Surrogate, Tokens, ratio, straight_through
from .params import ObjectiveParams

Gate = Literal["arctan", "sigmoid", "erf", "softsign"]


@dataclass(frozen=True)
class SSPOConfig(ObjectiveParams):
    """Parameters of `sspo`."""

    gate: Gate = "arctan"
    """Family of the gate."""
    coordinate: Literal["log", "ratio"] = "log"
    """Whether the gate sees log r or r - 1."""
    tau_pos: float = 1.0
    """Steepness for A > 0 [I]."""
    tau_neg: float = 1.0
    """Steepness for A <= 0 [I]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 0.0 if self.coordinate == "log" else 1.0
        for name in ("tau_pos", "tau_neg"):
            value = getattr(self, name)
            self.require(name, value > 0 and value >= least, "must be positive, and at least 1 where coordinate is ratio (or 1 + g < 0)")


def gate(x: Tensor, tau: Tensor, family: Gate) -> Tensor:
    """g(x) of the module's table: g(0) = 0, g'(0) = 1, bounded."""
    if family == "arctan":
        return torch.atan(tau * x) / tau
    if family == "sigmoid":
        return 4 / tau * (torch.sigmoid(tau * x) - 0.5)
    if family == "erf":
        return math.sqrt(math.pi) / 2 / tau * torch.erf(tau * x)
    return x / (1 + tau * x.abs())


def surrogate(tokens: Tokens, config: SSPOConfig) -> Surrogate:
    """See the module's formula. Metric: the mean sequence weight over tokens."""
    advantages_T = tokens.sequence_advantage_T()
    log_ratio_T = tokens.log_ratio_T
    tau_T = torch.where(advantages_T > 0, config.tau_pos, config.tau_neg).to(log_ratio_T.dtype)
    if config.coordinate == "log":
        gated_T = gate(log_ratio_T, tau_T, config.gate)
    else:
        gated_T = torch.log1p(gate(ratio(log_ratio_T) - 1, tau_T, config.gate))
    weight_S = ratio(tokens.segments.mean(gated_T.detach()))
    weight_T = straight_through(tokens.segments.spread(weight_S), gated_T)
    return Surrogate(-advantages_T * weight_T, {"weight_mean": tokens.average(weight_T)})


METHOD = Method(
    name="sspo",
    kind="objective",
    config=SSPOConfig,
    apply=surrogate,
    paper="2602.19327",
    evidence="AI",
    unit="sequence",
    summary="Geometric mean of softly gated token ratios (gate constants inferred)",
    aggregation="seq-mean-token-mean",
    needs=frozenset({"old"}),
)
