"""Scans of a long packed micro-batch on a CPU, in as few passes over memory as there can be.

A scan of one sequence runs at the speed of the adder, so what is left to save is everything around it. Tokens are selected by numpy's
bitwise and, or its maximum that passes over NaN: torch.where reads its condition byte by byte, which takes twice the time of the scan, and
torch's own bitwise and is slower, too. Each sequence is scanned in place without an offset to subtract, and nothing is gathered or
scattered. No gradient passes.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS: dict[torch.dtype, Any] = {torch.float32: np.int32, torch.float64: np.int64}


class SequenceScans:
    """Scans within sequences, for values that need no gradient.

    Args:
        mask_T: bool, the loss mask; on a CPU.
        starts_S: ascending positions at which a sequence with loss tokens begins: its first loss token.
    """

    def __init__(self, mask_T: Tensor, starts_S: Tensor) -> None:
        self._mask_T = mask_T
        self._starts_S = starts_S
        self._keeps: dict[torch.dtype, NDArray[Any]] = {}
        self._limits: dict[torch.dtype, NDArray[Any]] = {}

    def sum(self, x_T: Tensor) -> Tensor:
        """[T] sum over the sequence's loss tokens up to and including t; 0 where the mask is False. torch sums in fp64 here."""
        out_T = self._select(x_T, torch.empty_like(x_T, memory_format=torch.contiguous_format))
        for part in out_T.split(self._lengths):
            part.cumsum_(0)
        return self._select(out_T, out_T)

    def min_before(self, x_T: Tensor) -> Tensor:
        """[T] minimum over the sequence's loss tokens strictly before t; +inf at the first; 0 where the mask is False."""
        shifted_T = x_T.new_empty(len(x_T) + 1)
        minima_T = shifted_T[1:]
        # fmax takes the other number for a NaN: +inf where the mask is False, and x itself, NaN or not, where it is True.
        np.fmax(x_T.numpy(), self._limit(x_T.dtype), out=minima_T.numpy())
        where = torch.empty(max(self._lengths), dtype=torch.int64)  # each minimum stood; small enough for the cache
        for part in minima_T.split(self._lengths):
            torch.cummin(part, 0, out=(part, where[: len(part)]))
        shifted_T[self._starts_S] = torch.inf
        out_T = shifted_T[:-1]
        return self._select(out_T, out_T)

    @cached_property
    def _lengths(self) -> list[int]:
        """Of the pieces between the starts; what lies before the first start holds no loss token."""
        ends = [*self._starts_S.tolist(), len(self._mask_T)]
        return [ends[0], *(b - a for a, b in pairwise(ends))]

    def _select(self, x_T: Tensor, out_T: Tensor) -> Tensor:
        """out, with x where the mask is True and 0 elsewhere, whatever stands there."""
        np.bitwise_and(_bits(x_T), self._keep(x_T.dtype), out=_bits(out_T))
        return out_T

    def _keep(self, dtype: torch.dtype) -> NDArray[Any]:
        """[T] all bits where the mask is True, none elsewhere; integers of the size of dtype."""
        if dtype not in self._keeps:
            self._keeps[dtype] = -self._mask_T.numpy().astype(_BITS[dtype])
        return self._keeps[dtype]

    def _limit(self, dtype: torch.dtype) -> NDArray[Any]:
        """[T] NaN where the mask is True, +inf elsewhere."""
        if dtype not in self._limits:
            self._limits[dtype] = torch.where(self._mask_T, torch.nan, torch.inf).to(dtype).numpy()
        return self._limits[dtype]


def _bits(x_T: Tensor) -> NDArray[Any]:
    """The tensor's own memory as integers."""
    return x_T.numpy().view(_BITS[x_T.dtype])
