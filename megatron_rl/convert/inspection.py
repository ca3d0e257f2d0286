"""What is in a Hugging Face checkpoint folder, and in what two of them differ. One tensor at a time; knows nothing of Megatron."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .families import family_for
from .hf import HfReader
from .source import Source


@dataclass(frozen=True)
class Description:
    """A whole checkpoint."""

    family: str
    architecture: str
    layers: int
    moe_layers: int
    experts: int
    """Of one layer; 0 for a dense model."""
    tensors: int
    """Under the table's names, experts one by one."""
    parameters: int
    bytes: int
    """Of the weight files."""
    dtypes: dict[str, int]
    """Stored tensors of each dtype, as safetensors calls it."""


def describe(folder: str | Path) -> Description:
    """Checks names and shapes of every tensor against config.json, and counts.

    Raises:
        ValueError: an unsupported or damaged checkpoint.
    """
    reader = HfReader(folder)
    family = family_for(reader.config)
    shape = family.shape(reader.config)
    Source(reader, family, shape)
    sizes = [math.prod(size) for slot in family.slots(shape) for size in slot.hf_shapes(shape)]
    return Description(
        family=family.name,
        architecture=reader.config["architectures"][0],
        layers=shape.layers,
        moe_layers=sum(shape.moe_layers),
        experts=shape.experts,
        tensors=len(sizes),
        parameters=sum(sizes),
        bytes=reader.total_bytes(),
        dtypes=dict(Counter(reader.dtype(name) for name in sorted(reader.names()))),
    )


@dataclass(frozen=True)
class Difference:
    """A tensor that two checkpoints do not have in common."""

    name: str
    dtypes: tuple[str, str]
    max_abs: float
    """Largest difference of an element, in fp32; nan where one of both is not a number."""


def compare(folder: str | Path, reference: str | Path) -> Iterator[Difference]:
    """The tensors that differ in dtype or in a bit, under the table's names, so that fused and single experts compare.

    Raises:
        ValueError: a checkpoint is unsupported or damaged, or they are of models of different families or sizes.
    """
    readers = [HfReader(f) for f in (folder, reference)]
    families = [family_for(reader.config) for reader in readers]
    shapes = [family.shape(reader.config) for family, reader in zip(families, readers, strict=True)]
    if families[0] is not families[1] or shapes[0] != shapes[1]:
        raise ValueError(f"{folder} and {reference}: are models of different families or sizes; compare two of the same")
    ours, theirs = (Source(reader, families[0], shapes[0]) for reader in readers)
    for slot in families[0].slots(shapes[0]):
        for name in slot.hf_names:
            mine, other = ours.tensor(name), theirs.tensor(name)
            if mine.dtype != other.dtype or not torch.equal(mine, other):
                yield Difference(name, (_dtype(mine), _dtype(other)), float((mine.float() - other.float()).abs().max()))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
