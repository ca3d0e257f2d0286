"""From what the last stages say of packed tokens back to one array a trajectory or a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..types import Batch, PackedBatch
from .parallel import Mesh


def to_leader(
    mesh: Mesh, micro_batches: Sequence[PackedBatch], found: Sequence[Tensor], batch: Batch | None, *, everything: bool = True
) -> list[NDArray[np.float32]]:
    """[N] a trajectory of the leader's batch, NaN where there is no loss; empty on ranks that do not lead. Collective over each replica.

    Args:
        found: fp32 [T] a micro-batch, on the last stage; not looked at elsewhere.
        batch: what the micro-batches were packed from, on the leader.
        everything: whether they are all that were; otherwise what is not in them is NaN too.
    """
    entries = [_entries(b, x) for b, x in zip(micro_batches, found, strict=True)] if mesh.reports else []
    parts: list[Any] | None = [entries]
    if len(mesh.replica_ranks) > 1:
        parts = [None] * len(mesh.replica_ranks) if mesh.is_leader else None
        dist.gather_object(entries, parts, dst=mesh.replica_ranks[0], group=mesh.replica_group)
    if batch is None or parts is None:
        return []
    out = [np.full(len(t.tokens), np.nan, dtype=np.float32) for t in batch.trajectories]
    found_of = [0] * len(out)
    for part in parts:
        for samples, positions, values in part:
            starts = np.flatnonzero(np.diff(samples, prepend=-1))  # the tokens of a sequence stand together
            for start, end in zip(starts, [*starts[1:], len(samples)], strict=True):
                out[samples[start]][positions[start:end] + 1] = values[start:end]
                found_of[samples[start]] += end - start
    wanted = [t.response_tokens for t in batch.trajectories]
    assert not everything or found_of == wanted, f"{found_of} numbers came back for {wanted} loss tokens"
    return out


def sequences(mesh: Mesh, micro_batches: Sequence[PackedBatch], found: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """[n] the numbers of the loss tokens of each sequence of the mini-batch, over all data-parallel ranks, on every rank. Collective.

    Sequences without loss tokens are left out. For diagnostics: it gathers 4 bytes and a position a token.

    Args:
        found: fp32 [T] a micro-batch, on the last stage; not looked at elsewhere.
    """
    mine = [_entries(b, x) for b, x in zip(micro_batches, found, strict=True)] if mesh.reports else []
    parts: dict[tuple[int, int, int], list[tuple[NDArray[Any], NDArray[Any]]]] = {}
    for data_rank, entries in mesh.gather((mesh.data_rank, mine)):
        for index, (samples, positions, values) in enumerate(entries):
            for sample in np.unique(samples):
                here = samples == sample
                parts.setdefault((data_rank, index, int(sample)), []).append((positions[here], values[here]))
    out = []
    for pieces in parts.values():
        position, value = (np.concatenate(x) for x in zip(*pieces, strict=True))
        out.append(value[position.argsort()])
    return out


def _entries(batch: PackedBatch, found_T: Tensor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(sample, position of the input token, number) of each loss token of a micro-batch."""
    mask_T = batch.mask_T.cpu()
    sample_M = batch.sample_S[batch.sequence_T[mask_T]]
    return sample_M.numpy(), batch.positions_T[mask_T].numpy(), found_T.detach().float().cpu()[mask_T].numpy()
