"""A Megatron model without values: which parts of which tensors a rank of a layout has in a distributed checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from ..actor.model import PolicyModel, build_chunks, detect_implementation
from ..actor.parallel import Mesh
from ..config import Config
from .families import family_for
from .family import Slot
from .layouts import Shape
from .live import Key, held_parameters, live_shape


class Skeleton:
    """This rank's chunks on torch's meta device. Building one needs process groups and no memory.

    Args:
        config: model.dtype and parallel count.
        mesh: where this rank stands.
        hf: the model's config.json.
        kind: policy or value model.
    """

    def __init__(self, config: Config, mesh: Mesh, hf: Mapping[str, Any], kind: type[PolicyModel] = PolicyModel) -> None:
        self.mesh, self.family = mesh, family_for(hf)
        device = torch.device("meta")
        with device:
            nowhere = dataclasses.replace(mesh, device=device)
            _, self.chunks = build_chunks(config, self.family, hf, nowhere, detect_implementation(), kind)
        self.shape = live_shape(self.family, hf, self.chunks)
        trunk = kind is not PolicyModel
        self.parameters = held_parameters(self.chunks, self.family, self.shape, trunk=trunk)
        slots = {slot.key: slot for slot in self.family.slots(self.shape)}
        order = {key: number for number, key in enumerate(slots)}
        self._slots = {_storage(tensor): slots[key] for key, tensor in self.parameters.items()}
        self._order = {storage: order[slot.key] for storage, slot in self._slots.items()}

    def state_dict(self) -> dict[str, Any]:
        """As Megatron's `sharded_state_dict` of the chunks, under the names that training's checkpoints use."""
        names = ["model"] if len(self.chunks) == 1 else [f"model{number}" for number in range(len(self.chunks))]
        return {name: chunk.sharded_state_dict() for name, chunk in zip(names, self.chunks, strict=True)}

    def slot(self, part: ShardedTensor) -> Slot | None:
        """The tensor of the family's table that a part of the state dict is, or is cut from; None for a value head."""
        return self._slots.get(_storage(part.data))

    def order(self, part: ShardedTensor) -> tuple[int, str, tuple[int, ...]]:
        """Sorts parts by the family's table."""
        return self._order.get(_storage(part.data), len(self._order)), part.key, tuple(part.global_offset)

    def parts(self) -> dict[Key, list[ShardedTensor]]:
        """What each tensor of the table is made of in a checkpoint: one part, or several cut along rows."""
        state = self.state_dict()
        apply_factories(state)
        found: dict[Key, list[ShardedTensor]] = {}
        for part in nested_values(state):
            if isinstance(part, ShardedTensor) and (slot := self.slot(part)) is not None:
                found.setdefault(slot.key, []).append(part)
        return found


def stored_size(part: ShardedTensor) -> Shape:
    """As a checkpoint has it: with an axis of one for each axis (layers, experts) that the whole tensor has more than the parameter."""
    return (1,) * part.prepend_axis_num + tuple(part.local_shape)


def within(flat: Tensor, part: ShardedTensor) -> Tensor:
    """The view of a parameter's values [n] that a part of the state dict is."""
    data = part.data
    return flat.as_strided(data.shape, data.stride(), flat.storage_offset() + data.storage_offset())


def _storage(tensor: Tensor) -> int:
    """Tells tensors' storages apart, where addresses do not: on the meta device all are null."""
    return tensor.untyped_storage()._cdata
