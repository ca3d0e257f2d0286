"""From a Batch to packed micro-batches: which trajectory goes into which bin, and the tensors of each bin. Pure.

Every data-parallel rank must run the same number of micro-batches, none empty: `count_bins` says how many a rank needs, the ranks
agree on the largest, and `pack` fills exactly so many (splitting bins, then adding fillers, where a rank has few trajectories).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def positions_of(trajectory: Trajectory, align: int = 1) -> int:
    """Positions that a trajectory fills: its tokens less one, rounded up."""
    return _round_up(len(trajectory.tokens) - 1, align)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def pack(
    batch: Batch,
    *,
    budget: int,
    multiple_of: int = 1,
    align: int = 1,
    micro_batches: int | None = None,
    uniform: bool = False,
    length: int | None = None,
    experts: int = 0,
) -> list[PackedBatch]:
    """Packs every trajectory once.

    Args:
        budget: most positions of a micro-batch.
        multiple_of: a micro-batch's length is padded to a multiple of it (tensor-parallel size, times `align`).
        align: every sequence is padded to a multiple of it (2 x context-parallel size, where positions are cut over ranks). The gap
            belongs to the sequence in `cu_seqlens` and in `positions_T`; in everything else it is padding.
        micro_batches: exactly how many; None takes as few as needed.
        uniform: pad all micro-batches to one length, as pipeline parallelism needs.
        length: that length, when other ranks' micro-batches must match; None takes the longest here.
        experts: experts a layer, for the routes of padding rows.

    Raises:
        ValueError: a sequence alone exceeds the budget, or routes are malformed.
    """
    assert multiple_of % align == 0
    lengths = [positions_of(t, align) for t in batch.trajectories]
    count = micro_batches or count_bins(lengths, budget)
    bins = split_bins(lengths, count, budget)
    padded = [_round_up(max(FILLER_LENGTH, sum(lengths[i] for i in b)), multiple_of) for b in bins]
    if uniform:
        padded = [max(length or 0, *padded)] * len(padded)
    like = next((t.routes for t in batch.trajectories if t.routes is not None), None)
    return [_pack_one(batch, sorted(b), n, align, experts, like) for b, n in zip(bins, padded, strict=True)]


def _pack_one(batch: Batch, members: list[int], length: int, align: int, experts: int, like: NDArray[np.generic] | None) -> PackedBatch:
    chosen = [batch.trajectories[i] for i in members]
    real = [positions_of(t) for t in chosen] or [FILLER_LENGTH]
    spans = [_round_up(n, align) for n in real]
    used = sum(spans)
    boundaries = np.cumsum([0, *spans, *([length - used] if length > used else [])])

    def column(parts: list[NDArray[np.generic]], fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full((length,), fill, dtype=dtype)
        for begin, part in zip(boundaries.tolist(), parts, strict=False):
            out[begin : begin + len(part)] = torch.from_numpy(part.astype(_NUMPY[dtype]))
        return out

    def rows(of: Callable[[Trajectory], NDArray[np.generic] | None], fill: float, dtype: torch.dtype) -> Tensor | None:
        """[T, K] of what each trajectory has for its tokens, as wide as the batch's widest; None where the whole batch has none."""
        width = max((part.shape[1] for t in batch.trajectories if (part := of(t)) is not None), default=0)
        if not width:
            return None
        out = torch.full((length, width), fill, dtype=dtype)
        for begin, trajectory in zip(boundaries.tolist(), chosen, strict=False):
            part = of(trajectory)
            if part is not None:
                out[begin : begin + len(part) - 1, : part.shape[1]] = torch.from_numpy(part[1:].astype(_NUMPY[dtype]))
        return out

    positions = np.concatenate([np.arange(b - a) for a, b in pairwise(boundaries)])
    return PackedBatch(
        tokens_T=column([t.tokens[:-1] for t in chosen], 0, torch.int64),
        labels_T=column([t.tokens[1:] for t in chosen], 0, torch.int64),
        positions_T=torch.from_numpy(positions.astype(np.int64)),
        mask_T=column([t.loss_mask[1:] for t in chosen], 0, torch.bool),
        sequence_T=column([np.full(n, i) for i, n in enumerate(real)], len(real), torch.int64),
        turns_T=column([t.turns[1:] for t in chosen], -1, torch.int64),
        advantages_T=column([batch.advantages[i][1:] for i in members], 0.0, torch.float32),
        behaviour_logp_T=column([t.behaviour_logp[1:] for t in chosen], float("nan"), torch.float32),
        versions_T=column([t.versions[1:] for t in chosen], -1, torch.int64),
        cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
        sample_S=torch.tensor(members or [-1], dtype=torch.int64),
        routes_TLK=None if like is None else _routes(chosen, boundaries.tolist(), experts, like),
        candidate_ids_TK=rows(lambda t: t.candidates.ids if t.candidates else None, -1, torch.int64),
        candidate_logp_TK=rows(lambda t: t.candidates.logp if t.candidates else None, -float("inf"), torch.float32),
        keep_TK=rows(lambda t: t.keep_ids, -1, torch.int64),
        values_T=None if batch.values is None else column([batch.values[i][1:] for i in members], 0.0, torch.float32),
        returns_T=None if batch.returns is None else column([batch.returns[i][1:] for i in members], float("nan"), torch.float32),
    )


_NUMPY = {torch.int64: np.int64, torch.bool: np.bool_, torch.float32: np.float32}


def _routes(chosen: list[Trajectory], boundaries: list[int], experts: int, like: NDArray[np.generic]) -> Tensor:
    _, layers, k = like.shape
    dtype = torch.uint8 if like.dtype == np.uint8 else torch.int16
    out = padding_routes(boundaries[-1], layers, k, experts, dtype)
    for begin, trajectory in zip(boundaries, chosen, strict=False):
        if trajectory.routes is None:
            raise ValueError(f"trajectory of group {trajectory.group}: no routes, while others of the batch have them")
        part = torch.from_numpy(trajectory.routes.astype(np.int64)).to(dtype)
        check_routes(part, experts, f"trajectory of group {trajectory.group}")
        out[begin : begin + len(part)] = part
    return out
