"""The per-token divergence that DPPO, CPPO and NFPO threshold: which one, between which policies, detached."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .estimators import binary_kl, binary_tv, partition, partition_kl, partition_tv
from .objective import Need, pair_needs
from .tokens import Tokens

Divergence = Literal["binary_tv", "binary_kl", "top_k_tv", "top_k_kl"]
Anchor = Literal["theta/mu", "theta/old"]


def divergence_T(tokens: Tokens, which: Divergence, anchor: Anchor) -> Tensor:
    """[T] the divergence from the anchor policy to theta; nats for KL, a probability for TV."""
    logp_T, base_logp_T = tokens.logps(anchor)
    if which == "binary_tv":
        return binary_tv(logp_T, base_logp_T)
    if which == "binary_kl":
        return binary_kl(logp_T, base_logp_T)
    top_k = tokens.top_k(anchor)
    pi = partition(logp_T, top_k.logp_TK, top_k.has_label_T)
    base = partition(base_logp_T, top_k.base_logp_TK, top_k.has_label_T)
    return partition_tv(pi, base) if which == "top_k_tv" else partition_kl(pi, base)


def divergence_needs(which: Divergence, anchor: Anchor) -> frozenset[Need]:
    """What the divergence makes necessary."""
    return pair_needs(anchor) | (top_k_needs(anchor) if which.startswith("top_k") else frozenset())


def top_k_needs(anchor: Anchor) -> frozenset[Need]:
    """Whose likeliest tokens a partition is made of: those of the ratio's denominator."""
    return frozenset({"old_top_k"}) if anchor == "theta/old" else frozenset({"behaviour_top_k"})


def outward_T(log_ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
    """[T] whether the update would move theta further from the anchor: A > 0 with ratio > 1, or A < 0 with ratio < 1."""
    return advantages_T * log_ratio_T > 0
