"""Megatron distributed checkpoints of everything a run needs to go on: weights, optimizer, RNG, and the loop's own state.

A checkpoint is a folder `step_000010`. `state.json` is written last, by rename: a folder without it is not whole and is never loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from .actor import Actor
from .parallel import Mesh

STATE = "state.json"


@dataclass(frozen=True)
class TrainState:
    """What the loop must remember besides tensors. The data order follows from (seed, step)."""

    step: int
    """Rollout steps done."""
    optimizer_step: int
    """Optimizer steps done; drives the learning-rate schedule."""
    weight_version: int
    """Version of the weights in this checkpoint, as the engines know it."""
    seed: int
    architecture: str
    world_size: int
    has_optimizer: bool


def folders(root: Path) -> list[Path]:
    """Whole checkpoints under root, oldest first."""
    return sorted(f for f in root.glob("step_*") if (f / STATE).is_file())


def read_state(folder: Path) -> TrainState:
    """The state of a whole checkpoint.

    Raises:
        ValueError: there is none, or it is of another format.
    """
    file = folder / STATE
    if not file.is_file():
        raise ValueError(f"checkpoint: {str(folder)!r} has no {STATE}: it was not written to the end; use an older one")
    try:
        return TrainState(**json.loads(file.read_text()))
    except TypeError as error:
        raise ValueError(f"checkpoint: {str(file)!r} is of another version of megatron_rl ({error})") from error


def save(root: Path, actor: Actor, state: TrainState, keep: int) -> Path:
    """Writes root/step_<n>, then removes all but the newest `keep`. Collective."""
    mesh = actor.mesh
    folder = root / f"step_{state.step:06d}"
    if mesh.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    mesh.barrier()
    dist_checkpointing.save(_sharded(actor, is_loading=False, with_optimizer=state.has_optimizer), str(folder))
    mesh.barrier()
    if mesh.is_main:
        partial = folder / (STATE + ".partial")
        partial.write_text(json.dumps(dataclasses.asdict(state), indent=1))
        os.replace(partial, folder / STATE)
        for old in folders(root)[:-keep]:
            shutil.rmtree(old)
    mesh.barrier()
    return folder


def load(folder: Path, actor: Actor, architecture: str) -> TrainState:
    """Restores weights and, if the checkpoint has them and the actor trains, optimizer and RNG. Collective.

    Raises:
        ValueError: the checkpoint is not whole or is of another architecture.
    """
    state = read_state(folder)
    if state.architecture != architecture:
        raise ValueError(
            f"checkpoint: {str(folder)!r} holds a {state.architecture}, but model.path is a {architecture}; point it elsewhere"
        )
    actor.finish_loading()
    same_ranks = state.world_size == actor.mesh.world_size
    wanted = _sharded(actor, is_loading=True, with_optimizer=state.has_optimizer, with_rng=same_ranks)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for i, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(loaded[_model_key(actor, i)])
    if actor.optimizer is not None:
        if state.has_optimizer:
            actor.optimizer.load_state_dict(loaded["optimizer"])
        else:
            actor.optimizer.reload_model_params()
    if same_ranks:
        _restore_rng(loaded["rng"])
    return state


def _model_key(actor: Actor, index: int) -> str:
    return "model" if len(actor.chunks) == 1 else f"model{index}"


def _sharded(actor: Actor, *, is_loading: bool, with_optimizer: bool, with_rng: bool = True) -> dict[str, Any]:
    content: dict[str, Any] = {_model_key(actor, i): chunk.sharded_state_dict() for i, chunk in enumerate(actor.chunks)}
    if with_optimizer and actor.optimizer is not None:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
        metadata["chained_optim_avoid_prefix"] = True
        content["optimizer"] = actor.optimizer.sharded_state_dict(content, is_loading=is_loading, metadata=metadata)
    if with_rng:
        content["rng"] = _rng(actor.mesh)
    return content


def _rng(mesh: Mesh) -> ShardedObject:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what other packages draw from
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", state, (mesh.world_size,), (mesh.rank,), replica_id=0)


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
