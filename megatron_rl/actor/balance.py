"""Like work for every data-parallel rank: which trajectories change their leader, and the leaders handing them to each other.

Numbers alone are gathered (the length of every trajectory); from them all ranks plan the same moves. A trajectory then travels once,
whole, from the leader that has it straight to the leader that trains on it, over gloo. Rank 0 sees what it gives or takes itself.
"""

from __future__ import annotations

import dataclasses
import pickle
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..data.packing import Cost, positions_of
from ..types import Batch
from .parallel import Mesh

SLACK = 0.02
"""Trajectories move only to lower the costliest rank by more than this share, and until it is within this share of the mean."""


def model_cost(core: TransformerConfig, vocab_size: int) -> Cost:
    """FLOPs of one forward pass, as far as they depend on lengths; a backward pass costs twice that, recomputation once more.

    Args:
        core: the model; layers are gated or plain MLPs, or experts, as `moe_layer_freq` (a list) says.
        vocab_size: columns of the output projection.
    """
    hidden, width = core.hidden_size, core.num_attention_heads * core.kv_channels
    matrices = 3 if core.gated_linear_unit else 2
    attention = 2 * hidden * (2 * width + 2 * core.num_query_groups * core.kv_channels)
    dense = 2 * hidden * matrices * core.ffn_hidden_size
    moe_layers, moe = 0, 0
    if core.num_moe_experts:
        moe_layers = sum(core.moe_layer_freq)
        chosen = core.moe_router_topk * core.moe_ffn_hidden_size + (core.moe_shared_expert_intermediate_size or 0)
        moe = 2 * hidden * (matrices * chosen + core.num_moe_experts)
    layers = core.num_layers
    return Cost(
        linear=float(layers * attention + (layers - moe_layers) * dense + moe_layers * moe + 2 * hidden * vocab_size),
        # Q K^T and A V, 2 n^2 width each, of which the causal mask leaves half.
        quadratic=float(layers * 2 * width),
    )


@dataclass(frozen=True, order=True)
class Move:
    """One trajectory's change of owner."""

    source: int
    destination: int
    index: int
    """Into the source's Batch."""


def plan(costs: Sequence[Sequence[float]], slack: float = SLACK) -> list[Move]:
    """Few moves after which the costliest owner is as cheap as a greedy search makes it; none where that gains less than `slack`.

    The costliest owner gives to the cheapest, or exchanges one for one with it, whatever brings the two closest together. An owner
    without trajectories gets one in any case, while another has two.

    Args:
        costs: of each owner's trajectories, in the order of its Batch.
        slack: a share of the mean load.
    """
    items = [sorted((c, owner, i) for i, c in enumerate(mine)) for owner, mine in enumerate(costs)]
    moved: dict[tuple[int, int], int] = {}

    def give(item: tuple[float, int, int], source: int, destination: int) -> None:
        items[source].remove(item)
        items[destination].insert(bisect_left(items[destination], item), item)
        moved[item[1:]] = destination

    for empty in (owner for owner, mine in enumerate(items) if not mine):
        richest = max(range(len(items)), key=lambda owner: len(items[owner]))
        if len(items[richest]) > 1:
            give(items[richest][0], richest, empty)
    loads = [sum(mine) for mine in costs]
    for (owner, i), destination in moved.items():
        loads[owner] -= costs[owner][i]
        loads[destination] += costs[owner][i]
    required, before = dict(moved), max(loads)
    kept, best = required, before
    mean = sum(loads) / len(loads)
    for _ in range(sum(len(mine) for mine in costs)):
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        if loads[heavy] <= (1 + slack) * mean:
            break
        step = _step(items[heavy], items[light], loads[heavy] - loads[light])
        if step is None:
            break
        out, back = step
        give(out, heavy, light)
        if back is not None:
            give(back, light, heavy)
        carried = out[0] - (back[0] if back is not None else 0.0)
        loads[heavy] -= carried
        loads[light] += carried
        if max(loads) < best - 1e-3 * slack * mean:  # rounding is no gain
            best, kept = max(loads), dict(moved)
    if best > (1 - slack) * before:
        kept = required
    return sorted(Move(source, owner, i) for (source, i), owner in kept.items() if owner != source)


Item = tuple[float, int, int]
"""(cost, first owner, index there)."""


def _step(heavy: Sequence[Item], light: Sequence[Item], gap: float) -> tuple[Item, Item | None] | None:
    """What `heavy` gives and gets so that a gap in load closes best; a second trajectory travels only for twice the effect."""
    given = [c for c, *_ in heavy]
    single = _nearest(given, gap / 2)
    gain = min(given[single], gap - given[single])
    best: tuple[float, Item, Item | None] = (gain, heavy[single], None)
    if light and gain < gap / 4:
        taken = [c for c, *_ in light]
        for item in heavy:
            back = _nearest(taken, item[0] - gap / 2)
            carried = item[0] - taken[back]
            swap_gain = min(carried, gap - carried)
            if swap_gain > max(2 * gain, best[0]):
                best = (swap_gain, item, light[back])
    return best[1:] if best[0] > 0 else None


def _nearest(ascending: Sequence[float], value: float) -> int:
    place = bisect_left(ascending, value)
    return min((i for i in (place - 1, place) if 0 <= i < len(ascending)), key=lambda i: abs(ascending[i] - value))


def balance(mesh: Mesh, batch: Batch | None, cost: Cost, *, align: int = 1) -> Batch | None:
    """The leader's batch after the moves of `plan`: what it keeps in its old order, then what it got. Collective over all ranks.

    Advantages must have been taken: the trajectories of a group may part.

    Args:
        batch: on leaders; None on other ranks.
        align: see `packing.pack`.
    """
    assert (batch is not None) == mesh.is_leader
    if mesh.data_size == 1:
        return batch
    lengths = None if batch is None else np.array([positions_of(t, align) for t in batch.trajectories], dtype=np.int64)
    owners = [(rank, found.tolist()) for rank, found in enumerate(mesh.gather(lengths)) if found is not None]
    if batch is None:
        return None
    ranks = [rank for rank, _ in owners]
    planned = plan([[cost(n) for n in found] for _, found in owners])
    return exchange(mesh, batch, [Move(ranks[m.source], ranks[m.destination], m.index) for m in planned])


def exchange(mesh: Mesh, batch: Batch, moves: Sequence[Move]) -> Batch:
    """Carries out moves between global ranks, the same list on each of them; every pair sends one message, all at a time."""
    routes = {pair: [m.index for m in group] for pair, group in groupby(sorted(moves), key=lambda m: (m.source, m.destination))}
    outgoing = {to: pickle.dumps(batch.select(indices), protocol=5) for (source, to), indices in routes.items() if source == mesh.rank}
    incoming = [source for source, to in routes if to == mesh.rank]
    sizes = {source: torch.zeros(1, dtype=torch.int64) for source in incoming}
    _all_at_once(mesh, {to: torch.tensor([len(data)]) for to, data in outgoing.items()}, sizes)
    arrived = {source: torch.empty(int(size), dtype=torch.uint8) for source, size in sizes.items()}
    _all_at_once(mesh, {to: torch.frombuffer(bytearray(data), dtype=torch.uint8) for to, data in outgoing.items()}, arrived)
    gone = {m.index for m in moves if m.source == mesh.rank}
    kept = batch.select([i for i in range(len(batch.trajectories)) if i not in gone])
    return _joined([kept, *(pickle.loads(arrived[source].numpy().data) for source in incoming)])


def _all_at_once(mesh: Mesh, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    """Starts every transfer before waiting for any, so that no order of ranks can deadlock."""
    work = [dist.irecv(tensor, source, group=mesh.control_group) for source, tensor in receives.items()]
    work += [dist.isend(tensor, to, group=mesh.control_group) for to, tensor in sends.items()]
    for one in work:
        assert one is not None
        one.wait()


def _joined(parts: Sequence[Batch]) -> Batch:
    columns: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(Batch)):
        values = [getattr(part, name) for part in parts]
        assert len({v is None for v in values}) == 1, f"{name}: some leaders have it and some have not"
        columns[name] = None if values[0] is None else tuple(x for v in values for x in v)
    return Batch(**columns)
