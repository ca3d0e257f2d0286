"""The tensors of a Megatron checkpoint as Hugging Face has them, one slot of the family's table at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .family import Slot
from .mcore_reader import McoreReader
from .skeleton import Skeleton, stored_size, within

_MODEL = ("embedding.", "decoder.", "output_layer.")
"""How the keys of a model's own tensors begin; an optimizer's and a random state's do not."""


class McoreWeights:
    """A checkpoint seen through a family's table, checked as a whole first.

    Args:
        reader: of the checkpoint.
        skeleton: of the same model in one process, whatever layout wrote the checkpoint.

    Raises (on construction):
        ValueError: a tensor is missing, left over or of another shape.
    """

    def __init__(self, reader: McoreReader, skeleton: Skeleton) -> None:
        self._reader, self._skeleton, self._parts = reader, skeleton, skeleton.parts()
        wanted = {part.key: part for parts in self._parts.values() for part in parts}
        for key, part in wanted.items():
            reader.check(key, tuple(part.global_shape), padded=part.allow_shape_mismatch)
        for key in sorted(reader.keys() - wanted.keys()):
            if key.startswith(_MODEL):
                raise ValueError(f"{reader.folder}: tensor {key} does not belong to a {skeleton.family.name} model of this config.json")

    def dtype(self, slot: Slot) -> torch.dtype:
        """As it is stored."""
        return self._reader.dtype(self._parts[slot.key][0].key)

    def tensors(self, slot: Slot) -> tuple[Tensor, ...]:
        """The slot's Hugging Face tensors, in the stored dtype."""
        parts = self._parts[slot.key]
        # Rows of a vocabulary that another layout padded less stay as they are: what pads is left out in the end.
        full = torch.empty(self._skeleton.parameters[slot.key].shape, dtype=self.dtype(slot))
        for part in parts:
            rectangle = within(full.view(-1), part).view(stored_size(part))
            self._reader.read(part.key, tuple(part.global_offset), rectangle)
        return slot.mapping.layout.hf_from_full(full, self._skeleton.shape)
