"""Quantiles and thresholds of a whole mini-batch from additive histograms, so that they do not depend on how it was split."""

from __future__ import annotations

import torch
from torch import Tensor

QUANTILE_BINS = 4096
"""Equal bins over [0, 1]: a quantile is exact to 1 / 4096."""


def unit_histogram(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """[QUANTILE_BINS] fp64 counts of the masked values, clamped to [0, 1]."""
    bin_M = (x_T[mask_T].double() * QUANTILE_BINS).long().clamp(0, QUANTILE_BINS - 1)
    return torch.bincount(bin_M, minlength=QUANTILE_BINS).double()


def unit_quantile(counts: Tensor, q: float) -> Tensor:
    """The upper edge of the bin that holds the q-quantile; 0 of an empty histogram."""
    total = counts.sum()
    index = torch.searchsorted(counts.cumsum(0), (q * total).clamp(min=0.5))
    edge = (index.double() + 1) / QUANTILE_BINS
    return torch.where(total > 0, edge.clamp(max=1), torch.zeros_like(edge))
