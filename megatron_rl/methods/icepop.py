"""IcePop (2510.18855): token weight old/mu inside [low, high], zero outside. Evidence [F].

M(kap_t) = kap_t if low <= kap_t <= high else 0, detached;  each sequence is still divided by its unmasked length
"""

from __future__ import annotations

from dataclasses import dataclass

from .mis import BoundParams, correct
from .objective import Method


@dataclass(frozen=True)
class IcePopConfig(BoundParams):
    """Parameters of `icepop`."""

    low: float = 0.5
    """Smallest ratio kept."""
    high: float = 5.0
    """Largest ratio kept; GLM-5 and SkyRL use 2."""


METHOD = Method(
    name="icepop",
    kind="correction",
    config=IcePopConfig,
    apply=correct,
    paper="2510.18855",
    evidence="F",
    unit="token",
    summary="Token weight old/mu inside two bounds, zero outside",
    needs=IcePopConfig.needs,
)
