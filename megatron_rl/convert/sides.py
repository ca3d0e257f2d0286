"""A model that may be a Hugging Face folder or a Megatron checkpoint: its tensors and its answers, one way to ask for either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ..actor.parallel import Mesh
from ..config import ParallelConfig
from .families import family_for
from .family import Slot
from .forward import Answer, through_megatron, through_transformers
from .hf import HfReader, read_config
from .mcore_reader import McoreReader
from .mcore_weights import McoreWeights
from .reshard import stored_dtype
from .session import conversion_config, is_checkpoint, model_folder, newest
from .skeleton import Skeleton
from .source import Source


class HfWeights:
    """A Hugging Face folder's tensors by slot."""

    engine = "transformers"

    def __init__(self, folder: Path) -> None:
        reader = HfReader(folder)
        self.folder, self.hf = folder, reader.config
        self.family = family_for(reader.config)
        self.shape = self.family.shape(reader.config)
        self._source = Source(reader, self.family, self.shape)

    def tensors(self, slot: Slot) -> Sequence[Tensor]:
        """As stored, quantised weights as what they stand for."""
        return [self._source.tensor(name) for name in slot.hf_names]

    def answers(self, sequences: Sequence[Sequence[int]], mesh: Mesh) -> list[Answer]:
        """See `forward`."""
        return through_transformers(self.folder, sequences)


class MegatronWeights:
    """A Megatron checkpoint's tensors by slot."""

    engine = "megatron"

    def __init__(self, checkpoint: Path, template: str | None, mesh: Mesh) -> None:
        self.folder = newest(checkpoint)
        self._described = model_folder(self.folder, template)
        self.hf = read_config(self._described)
        newest(self.folder, self.hf["architectures"][0])
        reader = McoreReader(self.folder)
        skeleton = Skeleton(conversion_config(str(self._described), ParallelConfig(), stored_dtype(reader)), mesh, self.hf)
        self.family, self.shape = skeleton.family, skeleton.family.shape(self.hf)
        self._weights = McoreWeights(reader, skeleton)

    def tensors(self, slot: Slot) -> Sequence[Tensor]:
        """As stored."""
        return self._weights.tensors(slot)

    def answers(self, sequences: Sequence[Sequence[int]], mesh: Mesh) -> list[Answer]:
        """See `forward`."""
        return through_megatron(self.folder, self._described, sequences, mesh)


Side = HfWeights | MegatronWeights


def open_side(place: str, template: str | None, mesh: Mesh) -> Side:
    """A checkpoint of either kind, its names and shapes checked as a whole.

    Raises:
        ValueError: neither kind, unsupported, or damaged.
    """
    folder = Path(place)
    return MegatronWeights(folder, template, mesh) if is_checkpoint(folder) else HfWeights(folder)
