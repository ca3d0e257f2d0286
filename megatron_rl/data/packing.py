"""From a Batch to packed micro-batches: which trajectory goes into which bin, and the tensors of each bin. Pure.

Every data-parallel rank must run the same number of micro-batches, none empty: `count_bins` says how many a rank needs, the ranks
agree on the largest, and `pack` fills exactly so many (adding fillers where a rank has few trajectories). The budget of positions
bounds a bin (memory); what is evened out is its `Cost` (time), since the ranks of a pipeline or of expert parallelism wait for each
other in every micro-batch.

The partition is ours because no library keeps two measures: binpacking 2.0.1 and prtpy 0.8.3 (which needs an ILP solver) even out one
number and know no bound on another, and so does Karmarkar-Karp as verl has it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..routing.layout import LIVE, check_routes, padding_routes
from ..types import Batch, PackedBatch, Trajectory

FILLER_LENGTH = 2
"""Positions of a filler sequence; it carries no loss."""

SPARE = 32
"""One micro-batch more for every so many that are needed: the fewest possible are full to the last position, and cannot be evened out."""


@dataclass(frozen=True)
class Cost:
    """What a sequence costs: linear x n + quadratic x n^2 for n positions. Only the ratio of the two matters."""

    linear: float = 1.0
    """FLOPs a position: projections, FFN or chosen experts, vocabulary."""
    quadratic: float = 0.0
    """FLOPs a squared position: attention."""

    def __post_init__(self) -> None:
        assert self.linear > 0 and self.quadratic >= 0, f"{self}: a longer sequence must cost more"

    def __call__(self, positions: int) -> float:
        """FLOPs of a sequence."""
        return self.linear * positions + self.quadratic * positions * positions


POSITIONS = Cost()
"""Every position costs the same."""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices, best-fit decreasing (at most 11/9 of the fewest, and one): no bin's lengths sum to more than capacity."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free positions, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, (lengths[index], -1))
        if place == len(rooms):
            free, chosen = capacity, len(bins)
            bins.append([])
        else:
            free, chosen = rooms.pop(place)
        bins[chosen].append(index)
        insort(rooms, (free - lengths[index], chosen))
    return bins


def count_bins(lengths: Sequence[int], budget: int) -> int:
    """How many micro-batches of at most `budget` positions these sequences get; at least 1.

    Raises:
        ValueError: a sequence alone exceeds the budget.
    """
    if lengths and max(lengths) > budget:
        raise ValueError(
            f"train.tokens_per_micro_batch: {budget} cannot hold a sequence of {max(lengths)} positions; raise it, or lower "
            "data.max_prompt_tokens or rollout.max_new_tokens"
        )
    needed = len(best_fit(lengths, budget))
    return max(1, needed + needed // SPARE)


def split_bins(lengths: Sequence[int], bins: int, budget: int, cost: Cost = POSITIONS) -> list[list[int]]:
    """Exactly `bins` bins of at most `budget` positions, of costs as even as a greedy pass makes them, costliest first.

    Bins are empty, at the end, only where there are fewer sequences than bins. Ranks that wait for each other thus meet bins of like
    cost. `bins` must be at least `count_bins(lengths, budget)`.
    """
    packed = _least_loaded(lengths, bins, budget, cost)
    if packed is None:  # too tight for even bins: first make them fit
        packed = best_fit(lengths, budget)
        assert len(packed) <= bins, f"{len(packed)} bins are needed, {bins} given"
        packed = _split_costliest(packed + [[] for _ in range(bins - len(packed))], lengths, cost)
    return sorted(packed, key=lambda b: -sum(cost(lengths[i]) for i in b))


def _least_loaded(lengths: Sequence[int], bins: int, budget: int, cost: Cost) -> list[list[int]] | None:
    """The longest sequence first, always into the bin of least cost that has room; None where one finds no room."""
    packed: list[list[int]] = [[] for _ in range(bins)]
    room = [budget] * bins
    open_bins = [(0.0, b) for b in range(bins)]
    full: list[tuple[int, float, int]] = []  # (-room, cost, bin): too small for the sequence at hand, not for all that follow
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = lengths[index]
        while full and -full[0][0] >= n:
            _, load, b = heapq.heappop(full)
            heapq.heappush(open_bins, (load, b))
        while open_bins and room[open_bins[0][1]] < n:
            load, b = heapq.heappop(open_bins)
            heapq.heappush(full, (-room[b], load, b))
        if not open_bins:
            return None
        load, b = open_bins[0]
        heapq.heapreplace(open_bins, (load + cost(n), b))
        packed[b].append(index)
        room[b] -= n
    return packed


def _split_costliest(packed: list[list[int]], lengths: Sequence[int], cost: Cost) -> list[list[int]]:
    """Halves the costliest bin of several sequences until no bin is empty, or none can be halved."""
    while any(not b for b in packed) and any(len(b) > 1 for b in packed):
        costliest = max((b for b in packed if len(b) > 1), key=lambda b: sum(cost(lengths[i]) for i in b))
        packed.remove(costliest)
        packed.remove([])
        packed += [costliest[0::2], costliest[1::2]]
    return packed


def positions_of(trajectory: Trajectory, align: int = 1) -> int:
    """Positions that a trajectory fills: its tokens less one, rounded up."""
    return _round_up(len(trajectory.tokens) - 1, align)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def pack(
    batch: Batch,
    *,
    budget: int,
    cost: Cost = POSITIONS,
    multiple_of: int = 1,
    align: int = 1,
    micro_batches: int | None = None,
    uniform: bool = False,
    length: int | None = None,
    experts: int = 0,
    like: NDArray[np.generic] | None = None,
) -> list[PackedBatch]:
    """Packs every trajectory once, into micro-batches of like cost, costliest first.

    Args:
        budget: most positions of a micro-batch.
        cost: what a sequence costs; where micro-batches are uniform, they are evened out by positions instead, so that less is padded.
        multiple_of: a micro-batch's length is padded to a multiple of it (tensor-parallel size, times `align`).
        align: every sequence is padded to a multiple of it (2 x context-parallel size, where positions are cut over ranks). The gap
            belongs to the sequence in `cu_seqlens` and in `positions_T`; in everything else it is padding.
        micro_batches: exactly how many; None takes as few as needed.
        uniform: pad all micro-batches to one length, as pipeline parallelism needs.
        length: that length, when other ranks' micro-batches must match; None takes the longest here.
        experts: experts a layer, for the routes of padding rows.
        like: routes of any trajectory of any rank, for their layers, K and dtype, where this batch may have no trajectory of its own.

    Raises:
        ValueError: a sequence alone exceeds the budget, or routes are malformed.
    """
    assert multiple_of % align == 0
    lengths = [positions_of(t, align) for t in batch.trajectories]
    count = micro_batches or count_bins(lengths, budget)
    bins = split_bins(lengths, count, budget, POSITIONS if uniform else cost)
    padded = [_round_up(max(FILLER_LENGTH, sum(lengths[i] for i in b)), multiple_of) for b in bins]
    if uniform:
        padded = [max(length or 0, *padded)] * len(padded)
    like = next((t.routes for t in batch.trajectories if t.routes is not None), like)
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
    marks = any(t.routes_valid is not None and not t.routes_valid.all() for t in chosen)
    dtype = torch.uint8 if like.dtype == np.uint8 and not marks else torch.int16  # LIVE is negative
    out = padding_routes(boundaries[-1], layers, k, experts, dtype)
    for begin, trajectory in zip(boundaries, chosen, strict=False):
        if trajectory.routes is None:
            raise ValueError(f"trajectory of group {trajectory.group}: no routes, while others of the batch have them")
        part = torch.from_numpy(trajectory.routes.astype(np.int64)).to(dtype)
        check_routes(part, experts, f"trajectory of group {trajectory.group}")
        if trajectory.routes_valid is not None:
            part[torch.from_numpy(~trajectory.routes_valid)] = LIVE
        out[begin : begin + len(part)] = part
    return out
