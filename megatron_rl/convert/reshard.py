"""A Megatron checkpoint written anew under another layout: weights one tensor at a time, optimizer state through a model that trains."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ..actor.actor import Actor
from ..actor.base import MegatronModel
from ..actor.checkpoint import load, read_state, save, write_state
from ..actor.critic import Critic
from ..actor.model import PolicyModel, ValueModel
from ..actor.parallel import Mesh
from ..config import Config, Dtype, ParallelConfig
from .commands import save_streamed
from .families import family_for
from .hf import read_config
from .mcore_reader import McoreReader
from .partial import appearing, source_files
from .session import conversion_config, model_folder, newest, processes
from .skeleton import Skeleton, stored_size

log = logging.getLogger(__name__)

CRITIC = "critic"


def reshard(
    checkpoint: str, out: str, parallel: ParallelConfig | None = None, hf_template: str | None = None, *, weights_only: bool = False
) -> Path:
    """Writes a checkpoint again as ranks of another layout would. Collective under torchrun.

    Weights alone go through one at a time. Optimizer state is loaded into a model and an optimizer of the new layout and saved from
    there. Random states stay behind: they belong to ranks, and a run goes on without.

    Args:
        checkpoint: a step_* folder, or the folder of several, of which the newest whole one is taken.
        out: a new folder; the checkpoint keeps its step's name in it.
        parallel: the new layout over the ranks of torchrun.
        hf_template: a folder with the model's config.json, where the checkpoint has none.
        weights_only: leave optimizer state out.

    Returns:
        The new checkpoint's folder.

    Raises:
        ValueError: no whole checkpoint, a layout that does not fit it, optimizer state that Megatron cannot bring there, or `out` exists.
        RuntimeError: writing failed.
    """
    step = newest(Path(checkpoint))
    described = model_folder(step, hf_template)
    hf = read_config(described)
    newest(step, hf["architectures"][0])
    state = read_state(step)
    config = conversion_config(str(described), parallel or ParallelConfig(), stored_dtype(McoreReader(step)))
    with processes(config.parallel) as mesh:
        keeps = state.has_optimizer and not weights_only
        layout = dataclasses.asdict(config.parallel)
        origin = {"command": "reshard", "source": str(step.resolve()), "files": source_files(step), "ranks": mesh.world_size, "to": layout}
        with appearing(Path(out), {**origin, "optimizer": keeps}, is_main=mesh.is_main, barrier=mesh.barrier) as partial:
            if keeps:
                _through_models(config, mesh, hf, step, partial)
            else:
                _streamed(config, mesh, hf, step, partial / step.name)
                if mesh.is_main:
                    write_state(partial / step.name, dataclasses.replace(state, world_size=0, has_optimizer=False), hf)
        if mesh.is_main:
            log.info("wrote %s", Path(out) / step.name)
    return Path(out) / step.name


def stored_dtype(reader: McoreReader) -> Dtype:
    """Of the embedding, as everywhere in the configuration."""
    name = str(reader.dtype("embedding.word_embeddings.weight")).removeprefix("torch.")
    for dtype in get_args(Dtype):
        if name == dtype:
            return dtype
    raise ValueError(f"{reader.folder}: weights in {name} are not supported")


def _streamed(config: Config, mesh: Mesh, hf: Mapping[str, Any], step: Path, target: Path) -> None:
    kinds: dict[str, type[PolicyModel]] = {"": PolicyModel}
    if (step / CRITIC).is_dir():
        kinds[CRITIC] = ValueModel
    for name, kind in kinds.items():
        skeleton = Skeleton(config, mesh, hf, kind)
        save_streamed(target / name, skeleton, _Rectangles(McoreReader(step / name)), what=f"reshard {name}".strip())


class _Rectangles:
    """Reads each part of the new layout from wherever the old one left it."""

    def __init__(self, reader: McoreReader) -> None:
        self._reader = reader

    def __call__(self, part: ShardedTensor) -> Tensor:
        reader = self._reader
        reader.check(part.key, tuple(part.global_shape), padded=part.allow_shape_mismatch)
        # Rows of a vocabulary that the old layout padded less stay zero.
        made = torch.zeros(stored_size(part), dtype=reader.dtype(part.key))
        reader.read(part.key, tuple(part.global_offset), made)
        return made.view(part.local_shape)


def _through_models(config: Config, mesh: Mesh, hf: Mapping[str, Any], step: Path, target: Path) -> None:
    family = family_for(hf)
    models: dict[str, MegatronModel] = {"actor": Actor(config, mesh, family, hf)}
    if (step / CRITIC).is_dir():
        models[CRITIC] = Critic(config, mesh, family, hf)
    try:
        state = load(step, models, hf["architectures"][0])
    except (CheckpointException, CheckpointingException, KeyError) as error:
        raise ValueError(
            f"checkpoint: Megatron cannot bring the optimizer state of {str(step)!r} to {_words(config.parallel)} ({_first_line(error)}); "
            "pass --weights_only true, and the run that takes it starts with a fresh optimizer"
        ) from error
    # Random states were loaded where there are as many ranks as then; others' are nobody's.
    save(target, models, dataclasses.replace(state, world_size=mesh.world_size if state.world_size == mesh.world_size else 0), keep=1)


def _words(parallel: ParallelConfig) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(parallel).items() if value not in (None, 1)) or "one rank each"


def _first_line(error: BaseException) -> str:
    """What Megatron or torch said; of several ranks, the first that failed."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
