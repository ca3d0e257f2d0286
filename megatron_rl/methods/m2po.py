"""M2PO (2510.01161): drop the largest squared log-ratios until the mean of the rest is below tau. Evidence [C].

    keep the mini-batch's tokens in ascending order of (log r)^2 for as long as their mean stays < tau

The order is global: a histogram of (log r)^2, 4096 bins spaced evenly in its logarithm, comes from the pre-pass, and whole bins go. A bin
is 0.9 % wide, so the threshold is exact to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Correction, Method, Need, Pair, Tokens, pair_needs
from .params import CorrectionParams

BINS = 4096
SMALLEST, LARGEST = 1e-12, 1e4
"""(log r)^2 below the first and above the second share the end bins."""


@dataclass(frozen=True)
class M2POConfig(CorrectionParams):
    """Parameters of `m2po`."""

    tau: float = 0.04
    """Largest mean (log r)^2 of the tokens kept, nats^2."""
    pair: Pair = "theta/mu"
    """Which two policies; theta over the policy that sampled, since data may be stale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("tau", self.tau > 0, "must be positive; the paper's value is 0.04")


def _bin_T(square_T: Tensor) -> Tensor:
    position_T = (square_T.double().clamp(SMALLEST, LARGEST) / SMALLEST).log() / math.log(LARGEST / SMALLEST)
    return (position_T * BINS).long().clamp(0, BINS - 1)


def statistics(tokens: Tokens, config: M2POConfig) -> Mapping[str, Tensor]:
    """Count and sum of (log r)^2 in each bin, fp64."""
    square_M = tokens.detached_log_ratio(config.pair).square()[tokens.mask_T].double()
    zeros = square_M.new_zeros(BINS)
    bin_M = _bin_T(square_M)
    return {"count": zeros.index_add(0, bin_M, torch.ones_like(square_M)), "sum": zeros.index_add(0, bin_M, square_M)}


def correct(tokens: Tokens, config: M2POConfig) -> Correction:
    """See the module's formula. Metrics: share kept, mean (log r)^2 before."""
    mean_so_far = tokens.totals["sum"].cumsum(0) / tokens.totals["count"].cumsum(0).clamp(min=1)
    bins_kept = (mean_so_far < config.tau).sum()  # the mean grows along the bins, so these are the first ones
    square_T = tokens.detached_log_ratio(config.pair).square()
    return Correction.mask(_bin_T(square_T) < bins_kept, tokens, {"second_moment": tokens.average(square_T)})


def _needs(config: M2POConfig) -> frozenset[Need]:
    return pair_needs(config.pair)


METHOD = Method(
    name="m2po",
    kind="correction",
    config=M2POConfig,
    apply=correct,
    paper="2510.01161",
    evidence="C",
    unit="token",
    summary="Drops extreme tokens until the second moment of the log-ratio is small",
    needs=_needs,
    statistics=statistics,
)
