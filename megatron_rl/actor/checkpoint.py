"""Megatron distributed checkpoints of everything a run needs to go on: weights, optimizer, RNG, and the loop's own state.

A checkpoint is a folder `step_000010`. `state.json` is written last, by rename: a folder without it is not whole and is never loaded.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from ..files import write_json
from .base import MegatronModel
from .optimizer import parts
from .parallel import Mesh
from .randomness import random_states, restore_random_states

STATE = "state.json"
SHARDING = "fully_reshardable"
"""Megatron's format in which any layout reads the optimizer state of any other."""


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
    prompt_batches: int = 0
    """Batches of prompts drawn so far; more than `step` where dynamic sampling drew again."""
    schedules: Mapping[str, Any] = field(default_factory=dict)
    """State of each learning-rate schedule and of mipu by name, in JSON's types."""


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


def save(
    root: Path, models: Mapping[str, MegatronModel], state: TrainState, keep: int, extra: Callable[[Path], None] | None = None
) -> Path:
    """Writes root/step_<n>, then removes all but the newest `keep`. Collective.

    Args:
        models: "actor", and the "critic" where there is one; each has a folder of its own.
        extra: writes a rank's own files into the folder before it counts as whole.
    """
    mesh = models["actor"].mesh
    folder = root / f"step_{state.step:06d}"
    if mesh.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    for name, model in models.items():
        if mesh.is_main:
            _model_folder(folder, name).mkdir(parents=True)
        mesh.barrier()
        dist_checkpointing.save(_sharded(model, is_loading=False, with_optimizer=state.has_optimizer), str(_model_folder(folder, name)))
    if extra is not None:
        extra(folder)
    mesh.barrier()
    if mesh.is_main:
        write_state(folder, state, models["actor"].hf)
        for old in folders(root)[:-keep]:
            shutil.rmtree(old)
    mesh.barrier()
    return folder


def write_state(folder: Path, state: TrainState, hf: Mapping[str, Any]) -> None:
    """Makes a checkpoint whole; with the model's config.json, so that tools need nothing else to read it."""
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    write_json(folder / STATE, dataclasses.asdict(state))


def _model_folder(folder: Path, name: str) -> Path:
    return folder if name == "actor" else folder / name


def load(folder: Path, models: Mapping[str, MegatronModel], architecture: str) -> TrainState:
    """Restores weights and, if the checkpoint has them and the models train, optimizers and RNG. Collective.

    Raises:
        ValueError: the checkpoint is not whole, is of another architecture, or lacks a model.
    """
    state = read_state(folder)
    if state.architecture != architecture:
        raise ValueError(
            f"checkpoint: {str(folder)!r} holds a {state.architecture}, but model.path is a {architecture}; point it elsewhere"
        )
    for name, model in models.items():
        if not _model_folder(folder, name).is_dir():
            raise ValueError(f"checkpoint: {str(folder)!r} has no {name}: it was trained without; start in another logging.dir")
        _load_model(_model_folder(folder, name), model, state)
    return state


def _load_model(folder: Path, model: MegatronModel, state: TrainState) -> None:
    model.finish_loading()
    same_ranks = state.world_size == model.mesh.world_size
    wanted = _sharded(model, is_loading=True, with_optimizer=state.has_optimizer, with_rng=same_ranks)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for i, chunk in enumerate(model.chunks):
        chunk.load_state_dict(loaded[_model_key(model, i)])
    if model.optimizer is not None:
        if state.has_optimizer:
            model.optimizer.load_state_dict(_fitting(model.optimizer, loaded["optimizer"]))
        else:
            model.optimizer.reload_model_params()
    if same_ranks:
        restore_random_states(loaded["rng"])


def _fitting(optimizer: Any, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """What was loaded, in the shape that this layout's optimizer takes.

    With expert parallelism Megatron keeps an optimizer of its own for experts, and its settings stand in numbered entries. Tensors are
    named alike either way; settings are the run's own, and of the checkpoint's only the count of steps is needed.
    """
    mine = parts(optimizer)
    saved = [entry["optimizer"]["param_groups"] for entry in (loaded, *_numbered(loaded)) if "optimizer" in entry]
    if len(saved) == len(mine):
        return loaded
    steps = {group["step"] for groups in saved for group in groups}
    assert len(steps) == 1, f"parameters of one checkpoint took {steps} steps"
    entries = [loaded] if len(mine) == 1 else _numbered(loaded)
    for part, entry in zip(mine, entries, strict=True):
        groups = [{**{k: v for k, v in g.items() if k != "params"}, "step": min(steps)} for g in part.optimizer.param_groups]
        entry.update(optimizer={"param_groups": groups}, param_state_sharding_type=SHARDING)
    return entries[0] if len(mine) == 1 else dict(enumerate(entries))


def _numbered(loaded: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    return [loaded[key] for key in sorted(k for k in loaded if isinstance(k, int))]


def _model_key(actor: MegatronModel, index: int) -> str:
    return "model" if len(actor.chunks) == 1 else f"model{index}"


def _sharded(actor: MegatronModel, *, is_loading: bool, with_optimizer: bool, with_rng: bool = True) -> dict[str, Any]:
    content: dict[str, Any] = {_model_key(actor, i): chunk.sharded_state_dict() for i, chunk in enumerate(actor.chunks)}
    if with_optimizer and actor.optimizer is not None:
        metadata = {"distrib_optim_sharding_type": SHARDING, "distrib_optim_fully_reshardable_mem_efficient": False}
        metadata["chained_optim_avoid_prefix"] = True
        content["optimizer"] = actor.optimizer.sharded_state_dict(content, is_loading=is_loading, metadata=metadata)
    if with_rng:
        content["rng"] = _rng(actor.mesh)
    return content


def _rng(mesh: Mesh) -> ShardedObject:
    return ShardedObject("rng", random_states(), (mesh.world_size,), (mesh.rank,), replica_id=0)
