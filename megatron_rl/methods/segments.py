"""Sums, extrema, counts and scans over the sequences and turns of a packed micro-batch.

`Segments` is the algebra every method is written in. `LocalSegments` computes it on one device; `actor/segments.py` computes the
same over context-parallel shards, so a prefix never means a slice. Methods cannot tell which they were given.

Legend: T positions, S sequences. All values are fp32 or better; every operation selects with the loss mask, so whatever stands in
padding or in tool tokens (NaN included) has no effect. A prefix never crosses a sequence boundary and tool tokens do not advance it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from .scans import SequenceScans


class Segments(Protocol):
    """The algebra. `x_T` is float [T]; results per position are 0 (counts and sums) or as stated where the mask is False."""

    mask_T: Tensor

    def count(self) -> Tensor:
        """[S] number of loss tokens of each sequence, fp32."""
        ...

    def sum(self, x_T: Tensor) -> Tensor:
        """[S] sum over the loss tokens of each sequence; 0 where there is none."""
        ...

    def mean(self, x_T: Tensor) -> Tensor:
        """[S] mean over the loss tokens; 0 where there is none."""
        ...

    def max(self, x_T: Tensor) -> Tensor:
        """[S] maximum over the loss tokens; -inf where there is none."""
        ...

    def min(self, x_T: Tensor) -> Tensor:
        """[S] minimum over the loss tokens; +inf where there is none."""
        ...

    def spread(self, x_S: Tensor) -> Tensor:
        """[T] each sequence's value at each of its loss tokens; 0 elsewhere."""
        ...

    def prefix_sum(self, x_T: Tensor) -> Tensor:
        """[T] sum over the sequence's loss tokens up to and including t."""
        ...

    def prefix_count(self) -> Tensor:
        """[T] 1-based index of the loss token in its sequence, fp32."""
        ...

    def prefix_min_before(self, x_T: Tensor) -> Tensor:
        """[T] minimum over the sequence's loss tokens strictly before t; +inf at the first."""
        ...

    def window_sum_after(self, x_T: Tensor, n: int) -> Tensor:
        """[T] sum over the next n loss tokens of the sequence, t excluded (fewer at the end)."""
        ...

    def turn_sum(self, x_T: Tensor) -> Tensor:
        """[T] sum over the loss tokens that share t's sequence and turn, at each of them; 0 elsewhere."""
        ...

    def turn_mean(self, x_T: Tensor) -> Tensor:
        """[T] mean over the loss tokens that share t's sequence and turn, at each of them; 0 elsewhere."""
        ...


class LocalSegments:
    """`Segments` on one device.

    Args:
        sequence_T: int64, non-decreasing; equal values form a sequence. Values outside 0 .. num_sequences - 1 are padding.
        mask_T: bool, the loss mask. Must be False in padding.
        num_sequences: S.
        turn_T: int64 turn index of each loss token (any value elsewhere); None means one turn a sequence.
    """

    def __init__(self, sequence_T: Tensor, mask_T: Tensor, num_sequences: int, turn_T: Tensor | None = None) -> None:
        assert sequence_T.shape == mask_T.shape and mask_T.dtype == torch.bool
        self.mask_T = mask_T
        self.num_sequences = num_sequences
        self._has_turns = turn_T is not None
        # Work on the loss tokens alone: scans then skip tool tokens and padding by construction.
        self._index_M = mask_T.nonzero(as_tuple=True)[0]
        self._sequence_M = sequence_T[self._index_M]
        self._turn_M = self._sequence_M if turn_T is None else _dense_ids(self._sequence_M, turn_T[self._index_M])
        count_S = torch.zeros(num_sequences, dtype=torch.int64, device=mask_T.device)
        count_S.index_add_(0, self._sequence_M, torch.ones_like(self._sequence_M))
        self._count_S = count_S
        self._start_M = (count_S.cumsum(0) - count_S)[self._sequence_M]
        self._rank_M = torch.arange(self._index_M.numel(), device=mask_T.device) - self._start_M

    @cached_property
    def _scans(self) -> SequenceScans:
        return SequenceScans(self.mask_T, self._index_M[self._start_M[self._rank_M == 0]])

    def _fast(self, x_T: Tensor) -> bool:
        return x_T.device.type == "cpu" and not x_T.requires_grad

    def _take(self, x_T: Tensor) -> Tensor:
        return _at_least_fp32(x_T[self._index_M])

    def _put(self, x_M: Tensor) -> Tensor:
        return x_M.new_zeros(self.mask_T.shape).index_put((self._index_M,), x_M)

    def count(self) -> Tensor:
        return self._count_S.float()

    def sum(self, x_T: Tensor) -> Tensor:
        x_M = self._take(x_T)
        return x_M.new_zeros(self.num_sequences).index_add(0, self._sequence_M, x_M)

    def mean(self, x_T: Tensor) -> Tensor:
        total_S = self.sum(x_T)
        return total_S / self._count_S.clamp(min=1).to(total_S.dtype)

    def _extreme(self, x_T: Tensor, reduce: str, start: float) -> Tensor:
        x_M = self._take(x_T)
        out_S = torch.full((self.num_sequences,), start, dtype=x_M.dtype, device=x_M.device)
        return out_S.scatter_reduce(0, self._sequence_M, x_M, reduce=reduce, include_self=True)

    def max(self, x_T: Tensor) -> Tensor:
        return self._extreme(x_T, "amax", -torch.inf)

    def min(self, x_T: Tensor) -> Tensor:
        return self._extreme(x_T, "amin", torch.inf)

    def spread(self, x_S: Tensor) -> Tensor:
        return self._put(x_S[self._sequence_M])

    def prefix_sum(self, x_T: Tensor) -> Tensor:
        if self._fast(x_T):
            return self._scans.sum(_at_least_fp32(x_T))
        return self._put(self._inclusive(self._take(x_T)))

    def _inclusive(self, x_M: Tensor) -> Tensor:
        # A running total over the whole pack would let an early sequence's rounding into a late one: fp64 keeps the
        # difference of two totals exact to fp32 for any pack that fits in memory.
        total_M = torch.cat([x_M.new_zeros(1, dtype=torch.float64), x_M.double().cumsum(0)])
        return (total_M[1:] - total_M[self._start_M]).to(x_M.dtype)

    def prefix_count(self) -> Tensor:
        return self._put(self._rank_M.float() + 1)

    def prefix_min_before(self, x_T: Tensor) -> Tensor:
        if self._fast(x_T):
            return self._scans.min_before(_at_least_fp32(x_T))
        x_M = self._take(x_T)
        longest = int(self._count_S.max()) if self.num_sequences else 0
        padded_SC = x_M.new_full((self.num_sequences, longest + 1), torch.inf)
        padded_SC = padded_SC.index_put((self._sequence_M, self._rank_M + 1), x_M)
        return self._put(padded_SC.cummin(dim=1).values[self._sequence_M, self._rank_M])

    def window_sum_after(self, x_T: Tensor, n: int) -> Tensor:
        assert n >= 0
        x_M = self._take(x_T)
        total_M = torch.cat([x_M.new_zeros(1, dtype=torch.float64), x_M.double().cumsum(0)])
        here_M = torch.arange(x_M.numel(), device=x_M.device) + 1
        end_M = torch.minimum(here_M + n, self._start_M + self._count_S[self._sequence_M])
        return self._put((total_M[end_M] - total_M[here_M]).to(x_M.dtype))

    def turn_sum(self, x_T: Tensor) -> Tensor:
        if not self._has_turns:
            return self.spread(self.sum(x_T))
        x_M = self._take(x_T)
        groups = int(self._turn_M.max()) + 1 if self._turn_M.numel() else 0
        return self._put(x_M.new_zeros(groups).index_add(0, self._turn_M, x_M)[self._turn_M])

    def turn_mean(self, x_T: Tensor) -> Tensor:
        total_T = self.turn_sum(x_T)
        return total_T / self.turn_sum(torch.ones_like(total_T)).clamp(min=1)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _dense_ids(sequence_M: Tensor, turn_M: Tensor) -> Tensor:
    """0-based ids of the distinct (sequence, turn) pairs, in order."""
    pairs_M2 = torch.stack([sequence_M, turn_M], dim=1)
    ids_M: Tensor = torch.unique(pairs_M2, dim=0, return_inverse=True)[1]
    return ids_M
