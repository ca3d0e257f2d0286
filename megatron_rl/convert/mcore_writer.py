"""Megatron distributed checkpoints written one tensor at a time, in files of bounded size; whole ones survive an interruption.

Megatron's own writer wants every tensor of a rank in memory at once, and begins afresh after an interruption. This one is handed to it
as a strategy for the tensors; everything else (what belongs to whom, the common part, the format's version) stays Megatron's.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .layouts import Shape
from .mcore_reader import INDEX
from .partial import ALIGNMENT, JOURNAL, whole_file, write_json
from .progress import Progress
from .skeleton import stored_size

FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Written:
    """One entry of the checkpoint's index."""

    key: str
    offset: Shape | None
    """None for an object that is no tensor."""
    size: Shape
    whole: Shape
    """Of the tensor that this is a part of."""
    dtype: torch.dtype | None
    file: str
    start: int
    length: int


class StreamedSave(SaveShardedStrategy):
    """How `dist_checkpointing.save` writes tensors that exist only when their turn comes.

    Args:
        value: a part of the state dict without data -> its values, on the host, contiguous, in a storage of their own.
        order: sorts the parts of this rank; files hold neighbours.
        rank: of this process.
        gather: every rank's object, in order of rank, on every rank.
        progress: is told what was written.
        file_bytes: largest file, unless one tensor alone is larger.
    """

    can_handle_sharded_objects = True

    def __init__(
        self,
        value: Callable[[ShardedTensor], Tensor],
        order: Callable[[ShardedTensor], Any],
        *,
        rank: int,
        gather: Callable[[Any], list[Any]],
        progress: Callable[[int], Progress],
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__("torch_dist", 1)
        self._value, self._order, self._rank, self._gather = value, order, rank, gather
        self._progress, self._file_bytes = progress, file_bytes

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Collective. Megatron calls it."""
        parts = [part for part in nested_values(sharded_state_dict) if is_main_replica(part.replica_id)]
        objects = [part for part in parts if isinstance(part, ShardedObject)]
        tensors = sorted((part for part in parts if isinstance(part, ShardedTensor)), key=self._order)
        mine: list[Written] = []
        with self._progress(sum(_bytes(part) for part in tensors)) as progress:
            for number, group in enumerate(_groups([*objects, *tensors], self._file_bytes)):
                mine += self._file(Path(checkpoint_dir), f"__{self._rank}_{number}.distcp", group, progress)
        everyone = [entry for entries in self._gather(mine) for entry in entries]
        if self._rank == 0:
            with whole_file(Path(checkpoint_dir) / INDEX) as file:
                pickle.dump(_index(everyone), file)

    def _file(self, folder: Path, name: str, parts: list[Any], progress: Progress) -> list[Written]:
        """Writes a file, or takes it as an earlier run left it."""
        journal, size = folder / (name + JOURNAL), sum(_bytes(part) for part in parts)
        if journal.is_file() and (folder / name).is_file():
            stretches = json.loads(journal.read_text())
            assert len(stretches) == len(parts), f"{journal} is of another conversion"
            progress.skip(size)
        else:
            stretches = []
            with whole_file(folder / name) as file:
                for part in parts:
                    file.write(bytes(-file.tell() % ALIGNMENT))  # torch.save aligns values within what it writes
                    start = file.tell()
                    torch.save(self._content(part), file)
                    stretches.append([start, file.tell() - start])
                    progress.add(_bytes(part))
            # After the file: a journal without its file is worthless, a file without its journal is only written again.
            write_json(journal, stretches)
        return [_entry(part, name, *stretch) for part, stretch in zip(parts, stretches, strict=True)]

    def _content(self, part: Any) -> Any:
        return [part.data] if isinstance(part, ShardedObject) else self._value(part).view(stored_size(part))


def _bytes(part: Any) -> int:
    """Of a tensor's values; objects are next to nothing."""
    return 0 if isinstance(part, ShardedObject) else torch.Size(part.local_shape).numel() * part.dtype.itemsize


def _groups(parts: Iterable[Any], limit: int) -> Iterator[list[Any]]:
    """Neighbours of at most `limit` bytes together, or one alone."""
    group: list[Any] = []
    filled = 0
    for part in parts:
        if group and filled + _bytes(part) > limit:
            yield group
            group, filled = [], 0
        group.append(part)
        filled += _bytes(part)
    if group:
        yield group


def _entry(part: Any, file: str, start: int, length: int) -> Written:
    if isinstance(part, ShardedObject):
        return Written(part.unique_key, None, (), (), None, file, start, length)
    return Written(part.key, tuple(part.global_offset), stored_size(part), tuple(part.global_shape), part.dtype, file, start, length)


def _index(entries: Iterable[Written]) -> Metadata:
    """What `torch.distributed.checkpoint` reads as the checkpoint's table of contents."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for entry in entries:
        storage[MetadataIndex(entry.key, entry.offset)] = _StorageInfo(entry.file, entry.start, entry.length)
        if entry.offset is None:
            tensors[entry.key] = BytesStorageMetadata()
            continue
        assert entry.dtype is not None
        made = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.whole), [])
        chunks = tensors.setdefault(entry.key, made).chunks
        chunks.append(ChunkStorageMetadata(torch.Size(entry.offset), torch.Size(entry.size)))
    return Metadata(tensors, planner_data=None, storage_data=storage, storage_meta=StorageMeta())
