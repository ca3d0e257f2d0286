"""What is in a Megatron checkpoint, whatever layout wrote it: its versions, its model, its tensors."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..actor.checkpoint import read_state
from .families import family_for
from .mcore_reader import McoreReader
from .session import newest

FORMAT = "metadata.json"
"""Where Megatron names the format and its version."""
_OPTIMIZER = "optimizer"
"""How the keys of an optimizer's tensors begin."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model, of all layouts alike."""

    key: str
    shape: tuple[int, ...]
    """Experts, and layers where all are alike, are leading axes; the vocabulary is padded."""
    dtype: str
    pieces: int
    """Rectangles it is stored in."""


@dataclass(frozen=True)
class CheckpointDescription:
    """A whole checkpoint."""

    folder: str
    format: str
    """Megatron's name of it, and its version."""
    architecture: str
    family: str | None
    """None where the checkpoint has no config.json, and was written before checkpoints had one."""
    layers: int | None
    moe_layers: int | None
    experts: int | None
    step: int
    optimizer_step: int
    weight_version: int
    has_optimizer: bool
    has_critic: bool
    parameters: int
    """Padding of the vocabulary included."""
    bytes: int
    """Of all files with tensors, the optimizer's too."""
    optimizer_tensors: int
    dtypes: dict[str, int]
    """Tensors of the model of each dtype."""
    tensors: tuple[StoredTensor, ...]


def describe_checkpoint(folder: str | Path) -> CheckpointDescription:
    """Reads the index, checks that every file is there in full, and counts.

    Args:
        folder: a step_* folder, or the folder of several, of which the newest whole one is taken.

    Raises:
        ValueError: no whole checkpoint, or a damaged one.
    """
    step = newest(Path(folder))
    state, reader = read_state(step), McoreReader(step)
    model = sorted(key for key in reader.keys() if not key.startswith(_OPTIMIZER))  # noqa: SIM118 (no mapping)
    tensors = tuple(StoredTensor(k, reader.size(k), str(reader.dtype(k)).removeprefix("torch."), reader.pieces(k)) for k in model)
    return CheckpointDescription(
        folder=str(step),
        format=_format(step),
        architecture=state.architecture,
        **_sizes(step),
        step=state.step,
        optimizer_step=state.optimizer_step,
        weight_version=state.weight_version,
        has_optimizer=state.has_optimizer,
        has_critic=(step / "critic").is_dir(),
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        bytes=reader.total_bytes(),
        optimizer_tensors=len(reader.keys()) - len(model),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors)),
        tensors=tensors,
    )


def _format(step: Path) -> str:
    try:
        written = json.loads((step / FORMAT).read_text())
        return f"{written['sharded_backend']} {written['sharded_backend_version']}"
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{step / FORMAT}: does not name the checkpoint's format ({error}); copy the checkpoint again") from error


def _sizes(step: Path) -> dict[str, Any]:
    if not (step / "config.json").is_file():
        return {"family": None, "layers": None, "moe_layers": None, "experts": None}
    hf = json.loads((step / "config.json").read_text())
    family = family_for(hf)
    shape = family.shape(hf)
    return {"family": family.name, "layers": shape.layers, "moe_layers": sum(shape.moe_layers), "experts": shape.experts}
