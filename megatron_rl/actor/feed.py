"""From a leader's Batch to every rank's micro-batches: pack, cut each rank's own routes, hand out, count.

Nothing that grows with the batch passes through global rank 0: each data-parallel leader serves its own replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..data.packing import count_bins, pack, positions_of
from ..methods.objective import Denominators
from ..routing.layout import Place, cut
from ..types import Batch, PackedBatch
from .parallel import Mesh


@dataclass(frozen=True)
class Feed:
    """One mini-batch as a rank sees it."""

    micro_batches: list[PackedBatch]
    over: Denominators
    """Global: all data-parallel ranks, all micro-batches."""


def hand_out(
    mesh: Mesh, places: Sequence[Place], batch: Batch | None, *, budget: int, experts: int, max_tokens: int, multiple: int = 1
) -> Feed:
    """Collective over all ranks; leaders pass their Batch, the others None.

    Args:
        places: every rank's place, by rank.
        budget: most positions of a micro-batch.
        experts: experts a layer (0 for a dense model).
        max_tokens: the constant of seq-mean-token-sum-norm.
        multiple: the number of micro-batches is rounded up to it (`Actor.micro_batch_multiple`).

    Raises:
        ValueError: on every rank, when a leader's batch cannot be packed.
    """
    assert (batch is not None) == mesh.is_leader
    tensor, context = places[0].tensor_size, places[0].context_size
    assert context == 1, "packing for context parallelism is not supported yet"
    needed, tokens, sequences, problem = 0, 0, 0, None
    if batch is not None:
        masks = [t.loss_mask[1:] for t in batch.trajectories]
        tokens, sequences = sum(int(m.sum()) for m in masks), sum(bool(m.any()) for m in masks)
        try:
            needed = count_bins([positions_of(t) for t in batch.trajectories], budget)
        except ValueError as error:
            problem = str(error)
    answers = mesh.gather((needed, tokens, sequences, problem))
    for *_, message in answers:
        if message:
            raise ValueError(message)
    shards = None
    if batch is not None:
        packed = pack(
            batch,
            budget=budget,
            multiple_of=tensor,
            micro_batches=-(-max(a[0] for a in answers) // multiple) * multiple,
            uniform=mesh.pipeline_size > 1,
            experts=experts,
        )
        shards = [[_for_place(p, places[rank]) for p in packed] for rank in mesh.replica_ranks]
    return Feed(
        micro_batches=mesh.scatter(shards),
        over=Denominators(tokens=sum(a[1] for a in answers), sequences=sum(a[2] for a in answers), max_tokens=max_tokens),
    )


def _for_place(packed: PackedBatch, place: Place) -> PackedBatch:
    if packed.routes_TLK is None:
        return packed
    return dataclasses.replace(packed, routes_TLK=cut(packed.routes_TLK, packed.cu_seqlens, place))
