"""What every conversion starts with: its configuration, its process groups, and which checkpoint is meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist

from ..actor.checkpoint import STATE, folders, read_state
from ..actor.parallel import Mesh, create_mesh, destroy_mesh, prepare_process
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


@contextmanager
def processes(parallel: ParallelConfig) -> Iterator[Mesh]:
    """Process groups that end with the block, unless the process was in some before."""
    prepare_process(Config().train.threads)
    joined = dist.is_initialized()
    mesh = create_mesh(parallel)
    try:
        yield mesh
    finally:
        if not joined:
            destroy_mesh()


def conversion_config(folder: str, parallel: ParallelConfig, dtype: Dtype) -> Config:
    """A run's configuration in which only the model, its dtype and the layout mean anything.

    Args:
        folder: holds the model's config.json.

    Raises:
        ValueError: the layout does not fit the model.
    """
    config = Config(
        model=ModelConfig(path=folder, dtype=dtype),
        parallel=parallel,
        data=DataConfig(max_prompt_tokens=1),
        rollout=RolloutConfig(max_new_tokens=1),
        replay=ReplayConfig(mode="none"),
    )
    check_against_model(config, read_model_facts(folder))
    return config


def named_dtype(hf: Mapping[str, Any]) -> Dtype:
    """What config.json says of the weights; float32, transformers' default, where it says nothing."""
    named = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    for dtype in get_args(Dtype):
        if named == dtype:
            return dtype
    raise ValueError(f"config.json: dtype = {named!r} is not supported; pass --dtype with one of {', '.join(get_args(Dtype))}")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a Megatron checkpoint of ours, or holds some."""
    return (folder / STATE).is_file() or bool(folders(folder))


def newest(checkpoint: Path, architecture: str | None = None) -> Path:
    """A whole checkpoint: the folder itself, or the newest in it.

    Raises:
        ValueError: there is none, or it is of another architecture.
    """
    whole = [checkpoint] if (checkpoint / STATE).is_file() else folders(checkpoint)
    if not whole:
        raise ValueError(f"checkpoint: {str(checkpoint)!r} is no whole checkpoint and holds none")
    found = read_state(whole[-1]).architecture
    if architecture is not None and found != architecture:
        raise ValueError(f"checkpoint: {str(whole[-1])!r} holds a {found}, but config.json is of a {architecture}")
    return whole[-1]


def model_folder(checkpoint: Path, template: str | None) -> Path:
    """The folder whose config.json describes a checkpoint: the one that was given, or the checkpoint itself.

    Raises:
        ValueError: neither has one.
    """
    if template is not None:
        return Path(template)
    if (checkpoint / "config.json").is_file():
        return checkpoint
    raise ValueError(f"checkpoint: {str(checkpoint)!r} has no config.json; give --hf_template, a Hugging Face folder of the same model")
