"""A rank's shard of a micro-batch has its own columns of everything, and knows where sequences end."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_rl.actor.feed import last_positions, shard
from megatron_rl.routing.layout import Place
from megatron_rl.types import PackedBatch

CU_SEQLENS = torch.tensor([0, 8, 12, 16], dtype=torch.int32)
"""Sequences of 5 and 4 real positions padded to 8 and 4 (context 2), then padding."""


def whole() -> PackedBatch:
    """Every [T] field counts 0 .. 15, so that a shard shows which columns it took."""
    count = torch.arange(16)
    fields = {f.name: count for f in dataclasses.fields(PackedBatch) if f.name.endswith("_T")}
    sequence_T = torch.tensor([0] * 5 + [2] * 3 + [1] * 4 + [2] * 4)
    positions_T = torch.cat([torch.arange(8), torch.arange(4), torch.arange(4)])
    more = {"sequence_T": sequence_T, "positions_T": positions_T, "keep_TK": count[:, None].expand(16, 2)}
    return PackedBatch(**{**fields, **more}, cu_seqlens=CU_SEQLENS, sample_S=torch.tensor([0, 1]), routes_TLK=count[:, None, None])


def place(context: int, tensor: int = 0, tensors: int = 1) -> Place:
    return Place(tensor, tensors, context, 2, (0,))


def test_shard_takes_the_same_columns_of_every_field() -> None:
    """Rank 0 of 2 holds the first and last quarter of each sequence of 8, 4 and 4."""
    mine = [0, 1, 6, 7, 8, 11, 12, 15]
    batch = shard(whole(), place(0))
    for field in dataclasses.fields(PackedBatch):
        value: Tensor | None = getattr(batch, field.name)
        if field.name.endswith("_T") and field.name not in ("sequence_T", "positions_T"):
            assert value is not None
            assert value.tolist() == mine, field.name
    assert batch.keep_TK is not None
    assert batch.keep_TK.tolist() == [[i, i] for i in mine]
    assert batch.positions_T.tolist() == [0, 1, 6, 7, 0, 3, 0, 3]
    assert (batch.cu_seqlens.equal(CU_SEQLENS), batch.length, batch.num_sequences) == (True, 8, 2)


def test_tensor_ranks_share_a_shards_routes_but_not_its_columns() -> None:
    batch = shard(whole(), place(1, tensor=1, tensors=2))
    assert batch.routes_TLK is not None
    assert batch.tokens_T.tolist() == [2, 3, 4, 5, 9, 10, 13, 14]
    assert batch.routes_TLK.flatten().tolist() == [9, 10, 13, 14]


def test_the_last_token_is_the_last_real_one_on_the_rank_that_has_it() -> None:
    """Sequence 0 ends at its position 4, which rank 1 holds third; sequence 1 at its position 3, on rank 0. Gaps do not count."""
    last_S, position_S = last_positions(shard(whole(), place(0)))
    assert (last_S.tolist(), position_S.tolist()) == ([1, 5], [1, 3])
    last_S, position_S = last_positions(shard(whole(), place(1)))
    assert (last_S.tolist(), position_S.tolist()) == ([2, 5], [4, 2])


def test_a_shard_may_have_no_token_of_a_sequence() -> None:
    """One real token in a sequence of 4: rank 1 holds only its gap."""
    batch = dataclasses.replace(whole(), sequence_T=torch.tensor([0] * 8 + [1] + [2] * 7))
    last_S, position_S = last_positions(shard(batch, place(1)))
    assert (last_S.tolist(), position_S.tolist()) == ([3, -1], [5, -1])
