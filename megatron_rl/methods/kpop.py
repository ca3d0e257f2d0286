"""KPop (an option of AReaL, papers.md 8.12): mask a token if either binary KL is too large. Evidence [C]; default threshold [I].

keep_t = 1[ max( binKL(mu || p), binKL(p || mu) ) <= upper ],   p = old or theta, at the sampled token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .estimators import binary_kl
from .objective import Correction, Method, Need, Pair, Tokens, pair_needs
from .params import CorrectionParams


@dataclass(frozen=True)
class KPopConfig(CorrectionParams):
    """Parameters of `kpop`."""

    upper: float = 0.05
    """Largest binary KL in either direction, nats [I]: DPPO's KL threshold."""
    pair: Pair = "old/mu"
    """Which two policies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("upper", self.upper > 0, "must be positive; 0.05 nats is a starting point")


def correct(tokens: Tokens, config: KPopConfig) -> Correction:
    """See the module's formula."""
    logp_T, base_T = tokens.logps(config.pair)
    largest_T = torch.maximum(binary_kl(logp_T, base_T), binary_kl(base_T, logp_T))
    return Correction.mask(largest_T <= config.upper, tokens, {"kl_mean": tokens.average(largest_T)})


def _needs(config: KPopConfig) -> frozenset[Need]:
    return pair_needs(config.pair)


METHOD = Method(
    name="kpop",
    kind="correction",
    config=KPopConfig,
    apply=correct,
    paper="KPop (AReaL)",
    evidence="CI",
    unit="token",
    summary="Drops tokens whose binary KL is large in either direction",
    needs=_needs,
)
