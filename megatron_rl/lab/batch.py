"""From trajectories to the laboratory's flat arrays, and from packed micro-batches back to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..actor.parallel import Mesh
from ..methods.group import GroupConfig, group_advantages
from ..types import Batch, PackedBatch, Trajectory
from .records import TokenBatch


def token_batch(trajectories: Sequence[Trajectory], advantage_S: NDArray[np.float32]) -> TokenBatch:
    """What was sampled, flat over positions."""
    sizes = [len(t.tokens) - 1 for t in trajectories]
    mask = np.concatenate([t.loss_mask[1:] for t in trajectories])
    groups = {name: i for i, name in enumerate(dict.fromkeys(t.group for t in trajectories))}
    routes = [t.routes for t in trajectories if t.routes is not None]
    assert len(routes) in (0, len(trajectories)), "some trajectories have routes and some have none"
    return TokenBatch(
        label_T=np.concatenate([t.tokens[1:] for t in trajectories]).astype(np.int32),
        mask_T=mask,
        offsets_S=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        first_S=np.array([t.tokens[0] for t in trajectories], dtype=np.int32),
        turn_T=np.concatenate([t.turns[1:] for t in trajectories]).astype(np.int32),
        mu_T=np.where(mask, np.concatenate([t.behaviour_logp[1:] for t in trajectories]), 0.0).astype(np.float32),
        version_T=np.concatenate([t.versions[1:] for t in trajectories]).astype(np.int32),
        reward_S=np.array([t.reward or 0.0 for t in trajectories], dtype=np.float32),
        advantage_S=advantage_S,
        group_S=np.array([groups[t.group] for t in trajectories], dtype=np.int32),
        routes_TLK=narrow(np.concatenate(routes)) if routes else None,
    )


def narrow(routes_TLK: NDArray[Any]) -> NDArray[np.uint8] | NDArray[np.int16]:
    """Expert ids as uint8 where they fit, else int16."""
    return routes_TLK.astype(np.uint8) if routes_TLK.size == 0 or routes_TLK.max() < 256 else routes_TLK.astype(np.int16)


def advantages(trajectories: Sequence[Trajectory], seed: int) -> tuple[NDArray[np.float32], str]:
    """Group advantages of the rewards; where no group's rewards differ, random signs, for a mask can depend on the sign.

    Returns:
        One advantage a trajectory, and where it comes from: "rewards" or "random signs".
    """
    taken = group_advantages([t.reward or 0.0 for t in trajectories], [t.group for t in trajectories], GroupConfig())
    if np.any(taken):
        return taken, "rewards"
    signs = np.random.default_rng([seed, 1]).integers(0, 2, len(trajectories))
    return (2.0 * signs - 1.0).astype(np.float32), "random signs"


def training_batch(trajectories: Sequence[Trajectory], advantage_S: NDArray[np.float32], order: Sequence[int]) -> Batch:
    """Those trajectories, in that order, as the actor takes them."""
    chosen = [trajectories[i] for i in order]
    spread = [np.where(t.loss_mask, advantage_S[i], 0.0).astype(np.float32) for t, i in zip(chosen, order, strict=True)]
    return Batch(tuple(chosen), tuple(spread))


def shares(mesh: Mesh, order: Sequence[int]) -> list[list[int]]:
    """Which trajectories each data-parallel leader takes: every so-manieth."""
    return [list(order[rank :: mesh.data_size]) for rank in range(mesh.data_size)]


def to_flat(
    mesh: Mesh, micro_batches: Sequence[PackedBatch], found: Sequence[Tensor], order: Sequence[int], offsets_S: NDArray[np.int64]
) -> NDArray[Any]:
    """[T, ...] over the positions of all trajectories, on every rank. Collective over all ranks.

    Args:
        found: [positions of this rank's micro-batch, ...] each; looked at on ranks that report.
        order: as `shares` divided it.
    """
    mine = [_entries(b, x) for b, x in zip(micro_batches, found, strict=True)] if mesh.reports else []
    owners = shares(mesh, order)
    parts = [(owners[rank], entry) for rank, entries in mesh.gather((mesh.data_rank, mine)) for entry in entries]
    like = parts[0][1][2]
    out_T = np.zeros((int(offsets_S[-1]), *like.shape[1:]), dtype=like.dtype)
    filled_T = np.zeros(len(out_T), dtype=bool)
    for owned, (samples, positions, values) in parts:
        trajectory = np.asarray(owned)[samples]
        index = offsets_S[trajectory] + positions
        inside = index < offsets_S[trajectory + 1]  # context parallelism pads each sequence at its end
        out_T[index[inside]] = values[inside]
        filled_T[index[inside]] = True
    assert filled_T.all(), "a position came back without a number"
    return out_T


def _entries(batch: PackedBatch, found_T: Tensor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(trajectory in the leader's batch, position, number) of each real position."""
    real_T = batch.real_T.cpu()
    sample_M = batch.sample_S[batch.sequence_T[real_T]]
    return sample_M.numpy(), batch.positions_T[real_T].numpy(), found_T.detach().cpu()[real_T].numpy()


def masked_layers(batch: PackedBatch, layers: Sequence[int], mine: Sequence[int], live: int) -> PackedBatch:
    """The micro-batch whose routes are replayed at those depths only.

    Args:
        mine: depth of each layer of this rank's routes.
        live: the mark of rows where the router chooses.
    """
    assert batch.routes_TLK is not None
    routes = batch.routes_TLK.to(torch.int16, copy=True)
    for column, depth in enumerate(mine):
        if depth not in layers:
            routes[:, column] = live
    return dataclasses.replace(batch, routes_TLK=routes)
