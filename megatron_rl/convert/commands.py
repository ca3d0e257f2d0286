"""Whole conversions between Hugging Face folders and Megatron distributed checkpoints, in one process or under torchrun.

The layout only says over how many ranks the work is spread: a Megatron distributed checkpoint loads under any other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from ..actor.actor import Actor
from ..actor.checkpoint import STATE, TrainState, folders, load, save
from ..actor.parallel import create_mesh, destroy_mesh, prepare_process
from ..config import (
    Config,
    DataConfig,
    Dtype,
    ModelConfig,
    ParallelConfig,
    ReplayConfig,
    RolloutConfig,
    check_against_model,
    read_model_facts,
)
from .families import family_for
from .hf import read_config

log = logging.getLogger(__name__)


def hf_to_mcore(folder: str, out: str, parallel: ParallelConfig | None = None, dtype: Dtype | None = None) -> Path:
    """Writes a Megatron distributed checkpoint of a Hugging Face folder, without optimizer. Collective under torchrun.

    Args:
        folder: holds config.json and safetensors.
        out: a new folder; the checkpoint is its step_000000, where training resumes from when logging.dir/checkpoints is `out`.
        parallel: layout over the ranks of torchrun; one process needs none.
        dtype: of the checkpoint; null keeps config.json's.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: an unsupported or damaged checkpoint, a layout that does not fit it, or `out` exists.
    """
    if Path(out).exists():
        raise ValueError(f"out: {out!r} exists already; remove it or choose another folder")
    with _actor(folder, parallel or ParallelConfig(), dtype) as actor:
        actor.load_hf(folder)
        state = TrainState(
            step=0,
            optimizer_step=0,
            weight_version=0,
            seed=0,
            architecture=actor.hf["architectures"][0],
            world_size=actor.mesh.world_size,
            has_optimizer=False,
        )
        written = save(Path(out), {"actor": actor}, state, keep=1)
        if actor.mesh.is_main:
            log.info("wrote %s", written)
        return written


def mcore_to_hf(checkpoint: str, out: str, hf_template: str, parallel: ParallelConfig | None = None, dtype: Dtype | None = None) -> Path:
    """Writes a Hugging Face folder from a Megatron distributed checkpoint. Collective under torchrun.

    Args:
        checkpoint: a step_* folder, or the folder of several, of which the newest whole one is taken.
        out: a new folder.
        hf_template: a Hugging Face folder of the same model, for config.json and tokenizer; its weights are not read.
        parallel: layout over the ranks of torchrun; one process needs none.
        dtype: of the written tensors; null takes the template's.

    Returns:
        `out`.

    Raises:
        ValueError: no whole checkpoint, one of another architecture, a layout that does not fit, or `out` exists.
    """
    if Path(out).exists():
        raise ValueError(f"out: {out!r} exists already; remove it or choose another folder")
    with _actor(hf_template, parallel or ParallelConfig(), dtype) as actor:
        load(_newest(Path(checkpoint)), {"actor": actor}, actor.hf["architectures"][0])
        actor.save_hf(out, hf_template)
        if actor.mesh.is_main:
            log.info("wrote %s", out)
        return Path(out)


@contextmanager
def _actor(folder: str, parallel: ParallelConfig, dtype: Dtype | None) -> Iterator[Actor]:
    """An `Actor` that does not train, in process groups that end with the block unless the process was in some before."""
    hf = read_config(folder)
    family = family_for(hf)
    config = _config(folder, parallel, dtype or _own_dtype(folder))
    check_against_model(config, read_model_facts(folder))
    prepare_process(config.train.threads)
    joined = dist.is_initialized()
    mesh = create_mesh(parallel)
    try:
        yield Actor(config, mesh, family, hf, trains=False)
    finally:
        if not joined:
            destroy_mesh()


def _config(folder: str, parallel: ParallelConfig, dtype: Dtype) -> Config:
    """A run's configuration in which only the model and the layout mean anything."""
    return Config(
        model=ModelConfig(path=folder, dtype=dtype),
        parallel=parallel,
        data=DataConfig(max_prompt_tokens=1),
        rollout=RolloutConfig(max_new_tokens=1),
        replay=ReplayConfig(mode="none"),
    )


def _own_dtype(folder: str) -> Dtype:
    """What config.json says of the weights; float32, transformers' default, where it says nothing."""
    config = read_config(folder)
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    for dtype in get_args(Dtype):
        if named == dtype:
            return dtype
    raise ValueError(f"config.json: dtype = {named!r} is not supported; pass --dtype with one of {', '.join(get_args(Dtype))}")


def _newest(checkpoint: Path) -> Path:
    if (checkpoint / STATE).is_file():
        return checkpoint
    whole = folders(checkpoint)
    if not whole:
        raise ValueError(f"checkpoint: {str(checkpoint)!r} is no whole checkpoint and holds none")
    return whole[-1]
