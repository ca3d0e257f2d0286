"""OPSM, off-policy sequence masking (DeepSeek-V3.2, 2512.02556). Evidence [C].

    keep_i = 0 if A_i < 0 and mean_t( log p_t - log theta_t ) > delta;  1 otherwise      p = old or mu

delta is 1e-4 in slime and 0.5 in TRL's documentation: it must be tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .objective import Correction, Method, Need, Tokens, pair_needs
from .params import CorrectionParams


@dataclass(frozen=True)
class OPSMConfig(CorrectionParams):
    """Parameters of `opsm`."""

    delta: float = 1e-4
    """Largest mean log-ratio that a negative sequence may have fallen by, nats a token."""
    pair: Literal["theta/mu", "theta/old"] = "theta/mu"
    """Which two policies."""


def correct(tokens: Tokens, config: OPSMConfig) -> Correction:
    """See the module's formula. A sequence's sign is that of its mean advantage."""
    segments = tokens.segments
    fallen_T = -segments.spread(segments.mean(tokens.detached_log_ratio(config.pair)))
    keep_T = ~((tokens.sequence_advantage_T() < 0) & (fallen_T > config.delta))
    return Correction.mask(keep_T, tokens)


def _needs(config: OPSMConfig) -> frozenset[Need]:
    return pair_needs(config.pair)


METHOD = Method(
    name="opsm",
    kind="correction",
    config=OPSMConfig,
    apply=correct,
    paper="2512.02556",
    evidence="C",
    unit="sequence",
    summary="Drops negative sequences that theta already made unlikely",
    needs=_needs,
)
