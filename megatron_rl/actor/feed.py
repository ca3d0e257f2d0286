"""From a leader's Batch to every rank's micro-batches: pack, cut each rank's own columns and routes, hand out, count.

Nothing that grows with the batch passes through global rank 0: each data-parallel leader serves its own replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.packing import POSITIONS, Cost, count_bins, pack, positions_of
from ..methods.objective import Denominators
from ..routing.layout import Place, context_positions, cut
from ..types import Batch, PackedBatch
from .parallel import Mesh


@dataclass(frozen=True)
class Feed:
    """One mini-batch as a rank sees it."""

    micro_batches: list[PackedBatch]
    over: Denominators
    """Global: all data-parallel ranks, all micro-batches."""
    host_bytes: int = 0
    """Bytes that reached this rank for its micro-batches; 0 on a leader, which cut them itself."""
    batch: Batch | None = None
    """What they were packed from, on a leader; `sample_S` counts its trajectories."""


def hand_out(
    mesh: Mesh,
    places: Sequence[Place],
    batch: Batch | None,
    *,
    budget: int,
    experts: int,
    max_tokens: int,
    multiple: int = 1,
    cost: Cost = POSITIONS,
) -> Feed:
    """Collective over all ranks; leaders pass their Batch, the others None.

    Args:
        places: every rank's place, by rank.
        budget: most positions of a micro-batch.
        experts: experts a layer (0 for a dense model).
        max_tokens: the constant of seq-mean-token-sum-norm.
        multiple: the number of micro-batches is rounded up to it (`Actor.micro_batch_multiple`).
        cost: what a sequence costs (`balance.model_cost`); micro-batches are evened out over it.

    Raises:
        ValueError: on every rank, when a leader's batch cannot be packed.
    """
    assert (batch is not None) == mesh.is_leader
    align = alignment(places[0])
    needed, tokens, sequences, problem, like = 0, 0, 0, None, None
    if batch is not None:
        like = next((t.routes[:0] for t in batch.trajectories if t.routes is not None), None)
        masks = [t.loss_mask[1:] for t in batch.trajectories]
        tokens, sequences = sum(int(m.sum()) for m in masks), sum(bool(m.any()) for m in masks)
        try:
            needed = count_bins([positions_of(t, align) for t in batch.trajectories], budget)
        except ValueError as error:
            problem = str(error)
    answers = mesh.gather((needed, tokens, sequences, like, problem))
    for *_, message in answers:
        if message:
            raise ValueError(message)
    shards = None
    if batch is not None:
        packed = pack(
            batch,
            budget=budget,
            cost=cost,
            multiple_of=align * places[0].tensor_size,
            align=align,
            micro_batches=-(-max(a[0] for a in answers) // multiple) * multiple,
            uniform=mesh.pipeline_size > 1,
            experts=experts,
            like=next((a[3] for a in answers if a[3] is not None), None),
        )
        shards = ([shard(p, places[rank]) for p in packed] for rank in mesh.replica_ranks)
    mine, host_bytes = mesh.scatter(shards)
    return Feed(
        micro_batches=mine,
        host_bytes=host_bytes,
        batch=batch,
        over=Denominators(tokens=sum(a[1] for a in answers), sequences=sum(a[2] for a in answers), max_tokens=max_tokens),
    )


def shard_bytes(micro_batches: Sequence[PackedBatch]) -> int:
    """Bytes of all tensors of a rank's micro-batches, routes and columns."""
    values = (getattr(batch, f.name) for batch in micro_batches for f in dataclasses.fields(batch))
    return sum(v.nbytes for v in values if isinstance(v, Tensor))


def alignment(place: Place) -> int:
    """What each sequence's positions are padded to a multiple of, so that context parallelism can cut it."""
    return 2 * place.context_size if place.context_size > 1 else 1


def shard(packed: PackedBatch, place: Place) -> PackedBatch:
    """A rank's part of a whole micro-batch: its context-parallel columns of every [T] field, its rows and layers of the routes.

    `cu_seqlens` and `sample_S` stay the whole micro-batch's: attention and rotary embedding cut by them.
    """
    mine = context_positions(packed.cu_seqlens, place.context_rank, place.context_size)
    columns = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed) if f.name.endswith(("_T", "_TK"))}
    routes = None if packed.routes_TLK is None else cut(packed.routes_TLK, packed.cu_seqlens, place)
    return dataclasses.replace(packed, **{k: v[mine] for k, v in columns.items() if v is not None}, routes_TLK=routes)


def last_positions(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Where the last real token of each sequence stands in this rank's shard: ([S] index into the shard, [S] position in the sequence).

    Both are -1 where the shard has no token of the sequence. The rank with the largest position has the sequence's last token.
    """
    real_T = batch.sequence_T < batch.num_sequences
    index_T = torch.arange(batch.length)[real_T]
    last_S = torch.full((batch.num_sequences,), -1).scatter_reduce(0, batch.sequence_T[real_T], index_T, "amax")
    return last_S, torch.where(last_S >= 0, batch.positions_T[last_S], -1)
