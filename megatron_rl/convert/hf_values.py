"""The values of a Megatron checkpoint's parts, from a Hugging Face folder, one parameter in memory at a time."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from .family import Slot
from .layouts import GATE_UP, raw
from .live import Key, own_seat, part_index, parts
from .skeleton import Skeleton, within
from .source import Source


class HfValues:
    """Makes the parts of this rank's parameters; what is read for one part serves the next of the same parameter."""

    def __init__(self, source: Source, skeleton: Skeleton) -> None:
        self._source, self._skeleton = source, skeleton
        self._seat = own_seat(skeleton.chunks)
        self._key: Key | None = None
        self._flats: list[Tensor] = []

    def __call__(self, part: ShardedTensor) -> Tensor:
        """The values of a part, in its dtype and in a storage of their own."""
        slot = self._skeleton.slot(part)
        assert slot is not None, f"{part.key} belongs to no slot"
        if slot.key != self._key:
            self._flats.clear()  # first, so that never two are in memory
            self._flats, self._key = self._parameter(slot), slot.key
        return _alone(_cut(self._flats, part).to(part.dtype))

    def _parameter(self, slot: Slot) -> list[Tensor]:
        """This rank's shard of a parameter, flat, or the tensors that make it one after another."""
        layout, shape, divided = slot.mapping.layout, self._skeleton.shape, parts(slot)
        tensors = [self._finite(name) for name in slot.hf_names]
        if layout is GATE_UP and divided == 1:
            return [tensor.reshape(-1) for tensor in tensors]
        full = layout.full_from_hf(tensors, shape)
        return [layout.shard(full, divided, part_index(slot, self._seat)).reshape(-1)]

    def _finite(self, name: str) -> Tensor:
        """A tensor of the source: safetensors has no checksums, but most damage to floating-point numbers leaves some that are none."""
        tensor = self._source.tensor(name)
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            raise ValueError(f"tensor {name} has values that are not finite: it is damaged; copy the checkpoint again")
        return tensor


def _cut(flats: list[Tensor], part: ShardedTensor) -> Tensor:
    """The part of a parameter whose values are `flats`, one after another; a view where it lies in one of them."""
    if part.data.is_contiguous():
        start, count = part.data.storage_offset(), part.data.numel()
        for flat in flats:
            if start >= 0 and start + count <= flat.numel():
                return flat[start : start + count].view(part.data.shape)
            start -= flat.numel()
    return within(torch.cat(flats), part)


def _alone(tensor: Tensor) -> Tensor:
    """Contiguous, and as if it had no neighbours in its storage, which torch.save would write too."""
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.frombuffer(raw(tensor), dtype=tensor.dtype).view(tensor.shape)
