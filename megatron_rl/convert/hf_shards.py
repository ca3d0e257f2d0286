"""Hugging Face weight files written tensor by tensor, by one process or several, each file whole before it has its name.

What goes into which file follows from the family's table alone, so ranks share the files without talking, and a conversion that was
interrupted finds the files that it finished. A file is laid out as safetensors has it: a header, then all values without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .family import Family, Slot
from .hf import SHARD_BYTES, shard_file
from .layouts import ModelShape, Shape, raw
from .partial import ALIGNMENT, whole_file
from .progress import Progress
from .safetensors_file import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""As safetensors calls them."""
_LENGTH_BYTES = 8
"""Before the header."""


@dataclass(frozen=True)
class Unit:
    """Tensors that are written together, and the slots whose Hugging Face tensors, one after another, are their values."""

    slots: tuple[Slot, ...]
    tensors: tuple[tuple[str, Shape], ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(math.prod(shape) for _, shape in self.tensors) * self.dtype.itemsize


def units(family: Family, shape: ModelShape, dtype: torch.dtype) -> Iterator[Unit]:
    """Everything that the model's checkpoint holds: experts one by one, or together where the family's own checkpoints have them so."""
    together = family.written_together(shape)
    waiting: dict[str, list[Slot]] = {}
    for slot in family.slots(shape):
        kept = slot.mapping.dtype or dtype
        name, sizes = slot.hf_names[0], slot.hf_shapes(shape)
        if name not in together:
            yield Unit((slot,), tuple(zip(slot.hf_names, sizes, strict=True)), kept)
            continue
        experts = waiting.setdefault(together[name], [])
        experts.append(slot)
        if len(experts) == shape.experts:
            del waiting[together[name]]
            yield Unit(tuple(experts), ((together[name], (shape.experts, *sizes[0])),), kept)
    assert not waiting, f"too few experts for {sorted(waiting)}"


@dataclass(frozen=True)
class Shard:
    """One file."""

    name: str
    units: tuple[Unit, ...]

    @property
    def size(self) -> int:
        """Bytes of values."""
        return sum(unit.size for unit in self.units)

    def header(self) -> bytes:
        """Names, dtypes, shapes and places of all tensors, behind its own length; padded so that values are aligned."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for unit in self.units:
            for name, shape in unit.tensors:
                size = math.prod(shape) * unit.dtype.itemsize
                table[name] = {"dtype": DTYPE_NAMES[unit.dtype], "shape": list(shape), "data_offsets": [at, at + size]}
                at += size
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def shards(content: Iterable[Unit], limit: int = SHARD_BYTES) -> list[Shard]:
    """Files of at most `limit` bytes, or with one unit alone. Wider dtypes come first in each, so that every tensor is aligned."""
    groups: list[list[Unit]] = [[]]
    filled = 0
    for unit in content:
        if groups[-1] and filled + unit.size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(unit)
        filled += unit.size
    count = len(groups)
    return [
        Shard(shard_file(number, count), tuple(sorted(group, key=lambda unit: -unit.dtype.itemsize)))
        for number, group in enumerate(groups, 1)
    ]


def write(folder: Path, mine: Sequence[Shard], values: Callable[[Slot], Sequence[Tensor]], progress: Progress) -> None:
    """Writes files into `folder`, but for those that are there already, which an earlier run wrote.

    Args:
        values: the Hugging Face tensors of a slot, in any dtype.
    """
    for shard in mine:
        header = shard.header()
        if _is_there(folder / shard.name, header, shard.size):
            progress.skip(shard.size)
            continue
        with whole_file(folder / shard.name) as file:
            file.write(header)
            for unit in shard.units:
                for slot in unit.slots:
                    for tensor in values(slot):
                        file.write(raw(tensor.to(unit.dtype).contiguous()))
                progress.add(unit.size)
            assert file.tell() == len(header) + shard.size, f"{shard.name}: other sizes than the table's"


def _is_there(path: Path, header: bytes, size: int) -> bool:
    if not path.is_file() or path.stat().st_size != len(header) + size:
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header
