"""`Segments` over the context-parallel shards of a packed micro-batch.

Each rank scans its two chunks of every sequence as if each were a sequence, the ranks exchange the chunks' totals (one all-gather of
a small table an operation, whatever the length), and what came before a chunk is added to it. Only `window_sum_after` gathers whole
tokens. Every operation is collective: all ranks of the group must call the same ones in the same order, loss tokens or not.

Gradients pass: the backward of the exchange sums, over the ranks, what each rank's loss says of a total (a reduce-scatter), for
losses whose terms are positions, each counted by the rank that holds it, as `objective.reduce_loss` has them. A table that needs no
gradient costs nothing in backward; today's methods detach all they send here.

Legend: T positions of the shard, S sequences, C = 2 x context-parallel size chunks in order of position, G (sequence, turn) pairs.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from ..methods.segments import LocalSegments, Segments
from ..routing.layout import context_positions, gathered_order, second_chunk
from ..types import PackedBatch


def build_segments(batch: PackedBatch, device: torch.device, context_group: dist.ProcessGroup) -> Segments:
    """The algebra over a rank's micro-batch. Collective over `context_group` if that has more than one rank.

    Args:
        batch: as `actor.feed.hand_out` gave it: [T] fields of this rank's shard, `cu_seqlens` of the whole micro-batch.
    """
    sequence_T, mask_T, turn_T = (x.to(device) for x in (batch.sequence_T, batch.mask_T, batch.turns_T))
    if context_group.size() == 1:
        return LocalSegments(sequence_T, mask_T, batch.num_sequences, turn_T)
    return ShardedSegments(sequence_T, mask_T, batch.num_sequences, batch.cu_seqlens.to(device), context_group, turn_T)


class ShardedSegments:
    """`Segments` over zig-zag shards; equal to `LocalSegments` over the whole micro-batch, at this rank's positions.

    Args:
        sequence_T: int64, the sequence of each position of the shard; any other value where mask_T is False.
        mask_T: bool, the loss mask.
        num_sequences: S, equal on all ranks.
        cu_seqlens: int [S + 1] or more: where each sequence of the whole micro-batch begins, padding included, and its end.
        group: the context-parallel ranks.
        turn_T: int64 turn of each loss token, from 0 (any value elsewhere); None means one turn a sequence.
    """

    def __init__(
        self,
        sequence_T: Tensor,
        mask_T: Tensor,
        num_sequences: int,
        cu_seqlens: Tensor,
        group: dist.ProcessGroup,
        turn_T: Tensor | None = None,
    ) -> None:
        self.mask_T = mask_T
        self.num_sequences = num_sequences
        self._sequence_T = torch.where(mask_T, sequence_T, num_sequences)
        self._turn_T = turn_T
        self._cu_seqlens = cu_seqlens
        self._group = group
        half_T = second_chunk(cu_seqlens, group.size()).long()
        assert half_T.shape == mask_T.shape, f"{mask_T.numel()} positions, but the shard of this micro-batch has {half_T.numel()}"
        self._chunks = LocalSegments(2 * self._sequence_T + half_T, mask_T, 2 * num_sequences)
        self._count_CS = self._exchange(self._chunks.count())

    # -- the exchange ------------------------------------------------------------------------------------------------------------

    def _gather(self, x: Tensor) -> Tensor:
        """[size * n, ...] every rank's x, in order of rank."""
        return gather_from_sequence_parallel_region(x, group=self._group)

    def _exchange(self, x_2S: Tensor) -> Tensor:
        """[C, S] the totals of all chunks, in order of position, from each rank's of its own two chunks a sequence."""
        table_R2S = self._gather(x_2S.view(-1, 2).T).view(self._group.size(), 2, -1)
        return torch.cat([table_R2S[:, 0], table_R2S[:, 1].flip(0)])

    def _spread_own(self, table_CS: Tensor) -> Tensor:
        """[T] the value of its own chunk at each loss token; 0 elsewhere."""
        first = self._group.rank()
        return self._chunks.spread(torch.stack([table_CS[first], table_CS[-1 - first]], dim=1).flatten())

    # -- reductions --------------------------------------------------------------------------------------------------------------

    def count(self) -> Tensor:
        return self._count_CS.sum(0)

    def sum(self, x_T: Tensor) -> Tensor:
        return self._exchange(self._chunks.sum(x_T.double())).sum(0).to(_float_type(x_T))

    def mean(self, x_T: Tensor) -> Tensor:
        total_S = self.sum(x_T)
        return total_S / self.count().clamp(min=1).to(total_S.dtype)

    def max(self, x_T: Tensor) -> Tensor:
        return self._exchange(self._chunks.max(x_T)).amax(0)

    def min(self, x_T: Tensor) -> Tensor:
        return self._exchange(self._chunks.min(x_T)).amin(0)

    def spread(self, x_S: Tensor) -> Tensor:
        return self._chunks.spread(x_S.repeat_interleave(2))

    # -- scans -------------------------------------------------------------------------------------------------------------------

    def prefix_sum(self, x_T: Tensor) -> Tensor:
        total_CS = self._exchange(self._chunks.sum(x_T.double()))
        before_CS = torch.cat([torch.zeros_like(total_CS[:1]), total_CS[:-1].cumsum(0)])
        return (self._chunks.prefix_sum(x_T.double()) + self._spread_own(before_CS)).to(_float_type(x_T))

    def prefix_count(self) -> Tensor:
        before_CS = torch.cat([torch.zeros_like(self._count_CS[:1]), self._count_CS[:-1].cumsum(0)])
        return self._chunks.prefix_count() + self._spread_own(before_CS)

    def prefix_min_before(self, x_T: Tensor) -> Tensor:
        least_CS = self._exchange(self._chunks.min(x_T))
        before_CS = torch.cat([torch.full_like(least_CS[:1], torch.inf), least_CS[:-1].cummin(0).values])
        return torch.minimum(self._chunks.prefix_min_before(x_T), self._spread_own(before_CS))

    def window_sum_after(self, x_T: Tensor, n: int) -> Tensor:
        # A window may reach over any number of chunks, so every token travels (8 bytes each) and the sum is the local one.
        whole, order_T = self._whole
        mine_T = context_positions(self._cu_seqlens, self._group.rank(), self._group.size())
        return whole.window_sum_after(self._gather(x_T.double())[order_T], n)[mine_T].to(_float_type(x_T))

    @cached_property
    def _whole(self) -> tuple[LocalSegments, Tensor]:
        """The whole micro-batch's segments, and the order that `gathered_order` gives."""
        order_T = gathered_order(self._cu_seqlens, self._group.size())
        sequence_T = self._gather(self._sequence_T)[order_T]
        return LocalSegments(sequence_T, sequence_T < self.num_sequences, self.num_sequences), order_T

    # -- turns -------------------------------------------------------------------------------------------------------------------

    def turn_sum(self, x_T: Tensor) -> Tensor:
        if self._turn_T is None:
            return self.spread(self.sum(x_T))
        turns, _ = self._turns
        return turns.spread(self._gather(turns.sum(x_T.double())[None]).sum(0)).to(_float_type(x_T))

    def turn_mean(self, x_T: Tensor) -> Tensor:
        if self._turn_T is None:
            return self.spread(self.mean(x_T))
        turns, count_G = self._turns
        total_T = self.turn_sum(x_T)
        return total_T / turns.spread(count_G).clamp(min=1).to(total_T.dtype)

    @cached_property
    def _turns(self) -> tuple[LocalSegments, Tensor]:
        """Segments of the (sequence, turn) pairs, numbered alike on all ranks, and each pair's count over all ranks."""
        assert self._turn_T is not None
        last_S = self._exchange(self._chunks.max(self._turn_T.double())).amax(0)  # -inf without loss tokens
        turns_S = last_S.clamp(min=-1).long() + 1
        first_S = turns_S.cumsum(0) - turns_S
        pair_T = self.spread(first_S) + torch.where(self.mask_T, self._turn_T, 0)
        turns = LocalSegments(pair_T, self.mask_T, max(1, int(turns_S.sum())))
        return turns, self._gather(turns.count()[None]).sum(0)


def _float_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
