"""Whole conversions between Hugging Face folders and Megatron distributed checkpoints, in one process or under torchrun.

One tensor after another goes from source to target: no model is built. The layout only says what lies together in a checkpoint's files
and over how many ranks the work is spread: a Megatron distributed checkpoint loads under any other.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from ..actor.checkpoint import TrainState, write_state
from ..actor.model import DTYPES
from ..actor.parallel import Mesh
from ..config import Config, Dtype, ParallelConfig
from .hf import HfReader, read_config, write_companions
from .hf_shards import shards, units, write
from .hf_values import HfValues
from .mcore_reader import McoreReader
from .mcore_weights import McoreWeights
from .mcore_writer import FILE_BYTES, StreamedSave
from .partial import appearing, source_files
from .progress import Progress
from .session import conversion_config, named_dtype, newest, processes
from .skeleton import Skeleton
from .source import Source

log = logging.getLogger(__name__)


def hf_to_mcore(
    folder: str, out: str, parallel: ParallelConfig | None = None, dtype: Dtype | None = None, file_bytes: int = FILE_BYTES
) -> Path:
    """Writes a Megatron distributed checkpoint of a Hugging Face folder, without optimizer. Collective under torchrun.

    Args:
        folder: holds config.json and safetensors.
        out: a new folder; the checkpoint is its step_000000, where training resumes from when logging.dir/checkpoints is `out`.
        parallel: layout over the ranks of torchrun; one process needs none.
        dtype: of the checkpoint; null keeps config.json's.
        file_bytes: largest file, unless one tensor alone is larger; an interrupted conversion goes on with the first file it lacks.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: an unsupported or damaged checkpoint, a layout that does not fit it, or `out` exists.
        RuntimeError: writing failed; the message says what was kept.
    """
    hf = read_config(folder)
    config = conversion_config(folder, parallel or ParallelConfig(), dtype or named_dtype(hf))
    with processes(config.parallel) as mesh:
        skeleton = Skeleton(config, mesh, hf)
        source = Source(HfReader(folder), skeleton.family, skeleton.shape)
        origin = _origin("hf-to-mcore", Path(folder), mesh, **_options(config, file_bytes))
        with appearing(Path(out), origin, is_main=mesh.is_main, barrier=mesh.barrier) as partial:
            # No run's random states: those of a conversion are of no use to anybody.
            state = TrainState(0, 0, 0, seed=0, architecture=hf["architectures"][0], world_size=0, has_optimizer=False)
            step = partial / "step_000000"
            save_streamed(step, skeleton, HfValues(source, skeleton), what="hf-to-mcore", file_bytes=file_bytes)
            if mesh.is_main:
                write_state(step, state, hf)
        if mesh.is_main:
            log.info("wrote %s", Path(out) / "step_000000")
        return Path(out) / "step_000000"


def mcore_to_hf(
    checkpoint: str,
    out: str,
    hf_template: str,
    parallel: ParallelConfig | None = None,
    dtype: Dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Writes a Hugging Face folder from a Megatron distributed checkpoint of any layout. Ranks of torchrun share the files.

    Args:
        checkpoint: a step_* folder, or the folder of several, of which the newest whole one is taken.
        out: a new folder.
        hf_template: a Hugging Face folder of the same model, for config.json and tokenizer; its weights are not read.
        parallel: a layout that fits the ranks; the files come out alike under any.
        dtype: of the written tensors; null takes the template's.
        file_bytes: as for `hf_to_mcore`.

    Returns:
        `out`.

    Raises:
        ValueError: no whole checkpoint, a damaged one, one of another model, or `out` exists.
        RuntimeError: writing failed; the message says what was kept.
    """
    hf = read_config(hf_template)
    config = conversion_config(hf_template, ParallelConfig(), dtype or named_dtype(hf))
    with processes(config.parallel) as mesh:
        step = newest(Path(checkpoint), hf["architectures"][0])
        skeleton = Skeleton(config, mesh, hf)
        weights = McoreWeights(McoreReader(step), skeleton)
        origin = _origin("mcore-to-hf", step, mesh, template=hf, **_options(config, file_bytes))
        with appearing(Path(out), origin, is_main=mesh.is_main, barrier=mesh.barrier) as partial:
            files = shards(units(skeleton.family, skeleton.shape, DTYPES[config.model.dtype]), file_bytes)
            mine = files[mesh.rank :: mesh.world_size]
            with Progress("mcore-to-hf", sum(file.size for file in mine), shown=mesh.is_main) as progress:
                write(partial, mine, weights.tensors, progress)
            if mesh.is_main:
                weight_map = {name: file.name for file in files for unit in file.units for name, _ in unit.tensors}
                dtypes = {unit.dtype for file in files for unit in file.units}
                write_companions(partial, Path(hf_template), hf, weight_map, sum(file.size for file in files), dtypes)
        if mesh.is_main:
            log.info("wrote %s", out)
        return Path(out)


def save_streamed(
    folder: Path, skeleton: Skeleton, values: Callable[[ShardedTensor], Tensor], *, what: str, file_bytes: int = FILE_BYTES
) -> None:
    """Writes the tensors of a checkpoint folder, one in memory at a time. Collective.

    Args:
        values: see `StreamedSave`.
        what: stands before the progress.
        file_bytes: largest file.
    """
    mesh = skeleton.mesh
    if mesh.is_main:
        folder.mkdir(exist_ok=True)
    mesh.barrier()
    strategy = StreamedSave(
        values,
        skeleton.order,
        rank=mesh.rank,
        gather=mesh.gather,
        progress=lambda total: Progress(what, total, shown=mesh.is_main),
        file_bytes=file_bytes,
    )
    dist_checkpointing.save(skeleton.state_dict(), str(folder), sharded_strategy=strategy)


def _options(config: Config, file_bytes: int) -> dict[str, Any]:
    return {"parallel": dataclasses.asdict(config.parallel), "dtype": config.model.dtype, "file_bytes": file_bytes}


def _origin(command: str, source: Path, mesh: Mesh, **options: Any) -> Mapping[str, Any]:
    """What the files of a conversion depend on."""
    return {"command": command, "source": str(source.resolve()), "files": source_files(source), "ranks": mesh.world_size, **options}
