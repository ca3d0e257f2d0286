"""Which rows and layers of a micro-batch's routes each rank needs. Pure: no process group, no Megatron.

Legend: T positions of the pack (padding included), L MoE layers of the whole model, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def local_positions(cu_seqlens: Tensor, length: int, place: Place) -> Tensor:
    """int64 indices into the pack of the positions whose tokens pass this rank's routers, in the order they pass.

    Context parallelism cuts each sequence into 2 x size chunks; rank r holds chunks r and 2 x size - 1 - r (zig-zag). Tensor ranks
    then share the positions in equal contiguous parts.
    """
    position = torch.arange(length, device=cu_seqlens.device)
    if place.context_size > 1:
        pieces = []
        for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            chunks = position[begin:end].chunk(2 * place.context_size)
            pieces += [chunks[place.context_rank], chunks[2 * place.context_size - 1 - place.context_rank]]
        position = torch.cat(pieces)
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
