"""From a Batch to packed micro-batches: which trajectory goes into which bin, and the tensors of each bin. Pure.

Every data-parallel rank must run the same number of micro-batches, none empty: `count_bins` says how many a rank needs, the ranks
agree on the largest, and `pack` fills exactly so many (splitting bins, then adding fillers, where a rank has few trajectories).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..routing.layout import check_routes, padding_routes
from ..types import Batch, PackedBatch, Trajectory

FILLER_LENGTH = 2
"""Positions of a filler sequence; it carries no loss."""


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices, first-fit decreasing: no bin's lengths sum to more than capacity."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def count_bins(lengths: Sequence[int], budget: int) -> int:
    """How many micro-batches of at most `budget` positions these sequences need; at least 1.

    Raises:
        ValueError: a sequence alone exceeds the budget.
    """
    if lengths and max(lengths) > budget:
        raise ValueError(
            f"train.tokens_per_micro_batch: {budget} cannot hold a sequence of {max(lengths)} positions; raise it, or lower "
            "data.max_prompt_tokens or rollout.max_new_tokens"
        )
    return max(1, len(first_fit(lengths, budget)))


def split_bins(lengths: Sequence[int], bins: int, budget: int) -> list[list[int]]:
    """Exactly `bins` bins of at most `budget` positions, as even as first-fit decreasing makes them; some may be empty.

    `bins` must be at least `count_bins(lengths, budget)`.
    """
    low, high = max(lengths, default=1), budget
    while low < high:
        middle = (low + high) // 2
        if len(first_fit(lengths, middle)) <= bins:
            high = middle
        else:
            low = middle + 1
    # First-fit is not monotone in the capacity, so the found capacity is checked and the budget is the fallback.
    packed = first_fit(lengths, low)
    if len(packed) > bins:
        packed = first_fit(lengths, budget)
    assert len(packed) <= bins
    while len(packed) < bins and any(len(b) > 1 for b in packed):
        heaviest = max((b for b in packed if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        packed.remove(heaviest)
        packed += [heaviest[0::2], heaviest[1::2]]
    return packed + [[] for _ in range(bins - len(packed))]


def positions_of(trajectory: Trajectory, multiple_of: int = 1) -> int:
    """Positions that a trajectory fills: its tokens less one, rounded up."""
    return -(-(len(trajectory.tokens) - 1) // multiple_of) * multiple_of


def pack(
    batch: Batch,
    *,
    budget: int,
    multiple_of: int = 1,
    micro_batches: int | None = None,
    uniform: bool = False,
    length: int | None = None,
    experts: int = 0,
) -> list[PackedBatch]:
    """Packs every trajectory once.

    Args:
        budget: most positions of a micro-batch.
        multiple_of: a micro-batch's length is padded to a multiple of it (tensor-parallel size).
        micro_batches: exactly how many; None takes as few as needed.
        uniform: pad all micro-batches to one length, as pipeline parallelism needs.
        length: that length, when other ranks' micro-batches must match; None takes the longest here.
        experts: experts a layer, for the routes of padding rows.

    Raises:
        ValueError: a sequence alone exceeds the budget, or routes are malformed.
    """
    lengths = [positions_of(t) for t in batch.trajectories]
    count = micro_batches or count_bins(lengths, budget)
    bins = split_bins(lengths, count, budget)
    natural = [max(FILLER_LENGTH, sum(lengths[i] for i in b)) for b in bins]
    padded = [-(-n // multiple_of) * multiple_of for n in natural]
    if uniform:
        padded = [max(length or 0, *padded)] * len(padded)
    like = next((t.routes for t in batch.trajectories if t.routes is not None), None)
    return [_pack_one(batch, sorted(b), n, experts, like) for b, n in zip(bins, padded, strict=True)]


def _pack_one(batch: Batch, members: list[int], length: int, experts: int, like: NDArray[np.generic] | None) -> PackedBatch:
    chosen = [batch.trajectories[i] for i in members]
    spans = [positions_of(t) for t in chosen] or [FILLER_LENGTH]
    used = sum(spans)
    boundaries = np.cumsum([0, *spans, *([length - used] if length > used else [])])

    def column(parts: list[NDArray[np.generic]], fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full((length,), fill, dtype=dtype)
        if parts:
            joined = np.concatenate(parts)
            out[: len(joined)] = torch.from_numpy(joined.astype(_NUMPY[dtype]))
        return out

    positions = np.concatenate([np.arange(b - a) for a, b in pairwise(boundaries)])
    sequence = np.repeat(np.arange(len(spans)), spans)
    return PackedBatch(
        tokens_T=column([t.tokens[:-1] for t in chosen], 0, torch.int64),
        labels_T=column([t.tokens[1:] for t in chosen], 0, torch.int64),
        positions_T=torch.from_numpy(positions.astype(np.int64)),
        mask_T=column([t.loss_mask[1:] for t in chosen], 0, torch.bool),
        sequence_T=column([sequence], len(spans), torch.int64),
        turns_T=column([t.turns[1:] for t in chosen], -1, torch.int64),
        advantages_T=column([batch.advantages[i][1:] for i in members], 0.0, torch.float32),
        behaviour_logp_T=column([t.behaviour_logp[1:] for t in chosen], float("nan"), torch.float32),
        versions_T=column([t.versions[1:] for t in chosen], -1, torch.int64),
        cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
        sample_S=torch.tensor(members or [-1], dtype=torch.int64),
        routes_TLK=None if like is None else _routes(chosen, length, experts, like),
    )


_NUMPY = {torch.int64: np.int64, torch.bool: np.bool_, torch.float32: np.float32}


def _routes(chosen: list[Trajectory], length: int, experts: int, like: NDArray[np.generic]) -> Tensor:
    _, layers, k = like.shape
    dtype = torch.uint8 if like.dtype == np.uint8 else torch.int16
    parts = []
    for trajectory in chosen:
        if trajectory.routes is None:
            raise ValueError(f"trajectory of group {trajectory.group}: no routes, while others of the batch have them")
        part = torch.from_numpy(trajectory.routes.astype(np.int64)).to(dtype)
        check_routes(part, experts, f"trajectory of group {trajectory.group}")
        parts.append(part)
    used = sum(len(p) for p in parts)
    return torch.cat([*parts, padding_routes(length - used, layers, k, experts, dtype)])
