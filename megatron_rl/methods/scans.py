"""Scans of a long packed micro-batch on a CPU, in as few passes over memory as torch allows.

A scan of one sequence runs at the speed of the adder, so what is left to save is everything around it: tokens are selected by a
bitwise and, or by a maximum that passes over NaN (torch.where reads its condition byte by byte, which takes twice the time of the scan), each sequence is scanned in place
without an offset to subtract, and nothing is gathered or scattered. No gradient passes.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class SequenceScans:
    """Scans within sequences, for values that need no gradient.

    Args:
        mask_T: bool, the loss mask; on a CPU.
        starts_S: ascending positions at which a sequence with loss tokens begins: its first loss token.
    """

    def __init__(self, mask_T: Tensor, starts_S: Tensor) -> None:
        self._mask_T = mask_T
        self._starts_S = starts_S
        self._keeps: dict[torch.dtype, Tensor] = {}
        self._fills: dict[torch.dtype, Tensor] = {}

    def sum(self, x_T: Tensor) -> Tensor:
        """[T] sum over the sequence's loss tokens up to and including t; 0 where the mask is False. torch sums in fp64 here."""
        out_T = self._select(x_T)
        for part in out_T.split(self._lengths):
            part.cumsum_(0)
        return self._clear(out_T)

    def min_before(self, x_T: Tensor) -> Tensor:
        """[T] minimum over the sequence's loss tokens strictly before t; +inf at the first; 0 where the mask is False."""
        shifted_T = x_T.new_empty(len(x_T) + 1)
        minima_T = shifted_T[1:]
        # fmax takes the other number for a NaN: +inf where the mask is False, and x itself, NaN or not, where it is True.
        np.fmax(x_T.numpy(), self._limits(x_T.dtype).numpy(), out=minima_T.numpy())
        where = torch.empty(max(self._lengths), dtype=torch.int64)  # each minimum stood; small enough for the cache
        for part in minima_T.split(self._lengths):
            torch.cummin(part, 0, out=(part, where[: len(part)]))
        shifted_T[self._starts_S] = torch.inf
        return self._clear(shifted_T[:-1])

    @cached_property
    def _lengths(self) -> list[int]:
        """Of the pieces between the starts; what lies before the first start holds no loss token."""
        ends = [*self._starts_S.tolist(), len(self._mask_T)]
        return [ends[0], *(b - a for a, b in pairwise(ends))]

    def _select(self, x_T: Tensor) -> Tensor:
        """A copy of x where the mask is True, and 0 elsewhere, whatever stands there."""
        bits = _BITS[x_T.dtype]
        return (x_T.contiguous().view(bits) & self._keep(bits)).view(x_T.dtype)

    def _clear(self, x_T: Tensor) -> Tensor:
        """x itself, set to 0 where the mask is False."""
        bits = _BITS[x_T.dtype]
        x_T.view(bits).bitwise_and_(self._keep(bits))
        return x_T

    def _keep(self, bits: torch.dtype) -> Tensor:
        """[T] all bits where the mask is True, none elsewhere."""
        if bits not in self._keeps:
            self._keeps[bits] = -self._mask_T.to(bits)
        return self._keeps[bits]

    def _limits(self, dtype: torch.dtype) -> Tensor:
        """[T] NaN where the mask is True, +inf elsewhere."""
        if dtype not in self._fills:
            self._fills[dtype] = torch.where(self._mask_T, torch.nan, torch.inf).to(dtype)
        return self._fills[dtype]
