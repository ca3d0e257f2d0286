"""Which rows and layers of a micro-batch's routes each rank needs. Pure: no process group, no Megatron.

Legend: T positions of the pack (padding included), L MoE layers of the whole model, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LIVE = -1
"""Stands in place of every expert id of a row that cannot be replayed: its router chooses."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as far as routes care."""

    tensor_rank: int
    tensor_size: int
    """With more than one tensor rank, positions are split over them (sequence parallelism), as Megatron's MoE requires."""
    context_rank: int
    context_size: int
    layers: tuple[int, ...]
    """Global MoE layer indices (0-based among MoE layers) that the rank's model chunks hold."""


def second_chunk(cu_seqlens: Tensor, size: int) -> Tensor:
    """bool [T / size]: whether each of a context-parallel rank's positions lies in the second of its two chunks; equal on all ranks."""
    _, column_T, chunk_T = _shard_columns(cu_seqlens, size)
    return column_T >= chunk_T


def context_positions(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """int64 [T / size] indices into the pack of the positions that context-parallel rank `rank` of `size` holds, ascending.

    Each sequence is cut into 2 x size equal chunks; the rank holds chunks `rank` and 2 x size - 1 - `rank` (zig-zag), as Megatron's
    rotary embedding and Transformer Engine's attention expect.
    """
    begin_T, column_T, chunk_T = _shard_columns(cu_seqlens, size)
    skipped_T = torch.where(column_T < chunk_T, rank, 2 * (size - 1) - rank)
    return begin_T + column_T + skipped_T * chunk_T


def gathered_order(cu_seqlens: Tensor, size: int) -> Tensor:
    """int64 [T] index that puts the shards of all context-parallel ranks, one after another, back in the order of the pack."""
    return torch.cat([context_positions(cu_seqlens, rank, size) for rank in range(size)]).argsort()


def _shard_columns(cu_seqlens: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each position of a shard: where its sequence begins in the pack, its offset in the shard's part of it, its chunk's length."""
    begin_S, lengths_S = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    unit = 2 * size if size > 1 else 1
    assert bool((lengths_S % unit == 0).all()), f"sequences of {lengths_S.tolist()} positions cannot be cut into {unit} chunks each"
    row_T = torch.repeat_interleave(lengths_S // size)
    column_T = torch.arange(row_T.numel(), device=cu_seqlens.device) - (begin_S // size)[row_T]
    return begin_S[row_T], column_T, (lengths_S // unit)[row_T]


def local_positions(cu_seqlens: Tensor, length: int, place: Place) -> Tensor:
    """int64 indices into the pack of the positions whose tokens pass this rank's routers, in the order they pass.

    Tensor ranks share a context-parallel rank's positions (`context_positions`) in equal contiguous parts.
    """
    position = context_positions(cu_seqlens, place.context_rank, place.context_size)
    assert position.numel() * place.context_size == length
    assert position.numel() % place.tensor_size == 0, f"{position.numel()} positions cannot be split over {place.tensor_size} tensor ranks"
    return position.chunk(place.tensor_size)[place.tensor_rank]


def cut(routes_TLK: Tensor, cu_seqlens: Tensor, place: Place) -> Tensor:
    """[rows, layers, K] the rank's own shard, contiguous, in the dtype given."""
    rows = local_positions(cu_seqlens, routes_TLK.shape[0], place)
    columns = torch.tensor(place.layers, dtype=torch.int64, device=routes_TLK.device)
    return routes_TLK[rows][:, columns].contiguous()


def padding_routes(rows: int, layers: int, k: int, experts: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """[rows, layers, k] routes for padding: k distinct experts a row, spread evenly over all experts, so that no rank runs hot."""
    assert k <= experts
    first = torch.arange(rows)[:, None, None] * k + torch.arange(k)[None, None, :]
    return (first % experts).expand(rows, layers, k).to(dtype).contiguous()


def check_routes(routes_TLK: Tensor, experts: int, what: str) -> None:
    """Raises ValueError unless every row names distinct experts in 0 .. experts - 1."""
    if routes_TLK.numel() == 0:
        return
    low, high = int(routes_TLK.min()), int(routes_TLK.max())
    if low < 0 or high >= experts:
        raise ValueError(f"{what}: expert ids run from {low} to {high}, but the model has experts 0 to {experts - 1}")
    ordered = routes_TLK.long().sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ValueError(f"{what}: a token is sent to one expert twice; the engine's routes are broken (see sgl-project/sglang#12162)")
