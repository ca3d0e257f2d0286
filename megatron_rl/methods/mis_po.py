"""MIS-PO (2602.10604): two indicators, no weight. Evidence [C].

    J = sum_t 1[ rho_t in [token_low, token_high] ] 1[ rho_geo in [geo_low, geo_high] ] A_t log theta_t,   rho = theta/mu

The paper's loss is this mask on objective `policy_gradient` with weight none.
"""

from __future__ import annotations

from dataclasses import dataclass

from .levels import level_ratio
from .objective import Correction, Method, Need, Pair, Tokens, pair_needs
from .params import CorrectionParams


@dataclass(frozen=True)
class MISPOConfig(CorrectionParams):
    """Parameters of `mis_po`."""

    token_low: float = 0.5
    """Smallest token ratio kept."""
    token_high: float = 2.0
    """Largest token ratio kept."""
    geo_low: float = 0.996
    """Smallest geometric-mean ratio of a sequence kept."""
    geo_high: float = 1.001
    """Largest geometric-mean ratio of a sequence kept."""
    pair: Pair = "theta/mu"
    """Which two policies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("token_low", "geo_low"):
            self.require(name, 0 <= getattr(self, name) <= 1, "must be in [0, 1], or on-policy tokens would be dropped")
        for name in ("token_high", "geo_high"):
            self.require(name, getattr(self, name) >= 1, "must be at least 1, or on-policy tokens would be dropped")


def correct(tokens: Tokens, config: MISPOConfig) -> Correction:
    """See the module's formula. Metrics: share kept by both, and by each."""
    token_T = level_ratio(tokens, config.pair, "token")
    geo_T = level_ratio(tokens, config.pair, "geometric")
    by_token_T = (token_T >= config.token_low) & (token_T <= config.token_high)
    by_geo_T = (geo_T >= config.geo_low) & (geo_T <= config.geo_high)
    metrics = {"kept_share_token": tokens.share(by_token_T), "kept_share_sequence": tokens.share(by_geo_T)}
    return Correction.mask(by_token_T & by_geo_T, tokens, metrics)


def _needs(config: MISPOConfig) -> frozenset[Need]:
    return pair_needs(config.pair)


METHOD = Method(
    name="mis_po",
    kind="correction",
    config=MISPOConfig,
    apply=correct,
    paper="2602.10604",
    evidence="C",
    unit="sequence",
    summary="Keeps tokens and sequences whose ratios are within bounds",
    needs=_needs,
)
