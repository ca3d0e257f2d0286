"""The parameters of this rank's Megatron chunks, under their names in the whole model; and which rank holds which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from .family import Family, Slot
from .layouts import ModelShape

Key = tuple[str, int | None, int | None]

_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)")
_EXPERT = re.compile(r"(?<=local_experts\.)(\d+)|(?<=experts\.linear_fc[12]\.weight)(\d+)|(?<=experts\.linear_fc[12]\.bias)(\d+)")


def unwrap(chunk: nn.Module) -> Any:
    """The GPTModel inside Megatron's wrappers (data parallelism, mixed precision)."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def live_shape(family: Family, hf: Mapping[str, Any], chunks: Sequence[nn.Module]) -> ModelShape:
    """The sizes in config.json with the padded vocabulary of the model that was built.

    Raises:
        ValueError: the model was built for another checkpoint.
    """
    model = unwrap(chunks[0])
    shape = family.shape(hf, padded_vocab=model.vocab_size)
    if shape.padded_vocab < shape.vocab:
        raise ValueError(f"config.json: vocab_size = {shape.vocab} does not fit the model, whose padded vocabulary is {model.vocab_size}")
    if shape.layers != model.config.num_layers:
        raise ValueError(f"config.json: num_hidden_layers = {shape.layers}, but the model was built with {model.config.num_layers}")
    return shape


@dataclass(frozen=True)
class Seat:
    """What one rank holds."""

    rank: int
    pipeline: int
    tensor: int
    expert: int
    expert_tensor: int
    layers: tuple[int, ...]
    """By depth from 0."""
    first: bool
    """Whether it holds the embedding."""
    last: bool
    """Whether it holds the final norm and the output layer."""

    def holds(self, slot: Slot, experts_per_rank: int) -> bool:
        """Whether it has `slot` or a shard of it. A copy of a tied embedding on the last stage does not count."""
        if slot.layer is None:
            return self.first if slot.mapping.part == "embedding" else self.last
        return slot.layer in self.layers and (slot.expert is None or slot.expert // experts_per_rank == self.expert)


def own_seat(chunks: Sequence[nn.Module]) -> Seat:
    """This rank's, from the modules it was given and Megatron's groups."""
    models = [unwrap(chunk) for chunk in chunks]
    return Seat(
        rank=dist.get_rank(),
        pipeline=ps.get_pipeline_model_parallel_rank(),
        tensor=ps.get_tensor_model_parallel_rank(),
        expert=ps.get_expert_model_parallel_rank(),
        expert_tensor=ps.get_expert_tensor_parallel_rank(),
        layers=tuple(layer.layer_number - 1 for model in models for layer in model.decoder.layers),
        first=any(model.pre_process for model in models),
        last=any(model.post_process for model in models),
    )


def parts(slot: Slot) -> int:
    """Over how many ranks a slot is divided, where its layout divides at all."""
    return ps.get_tensor_model_parallel_world_size() if slot.expert is None else ps.get_expert_tensor_parallel_world_size()


def part_index(slot: Slot, seat: Seat) -> int:
    """Which of `parts` a rank holds."""
    return seat.tensor if slot.expert is None else seat.expert_tensor


def experts_per_rank(shape: ModelShape) -> int:
    """Experts of one layer on one rank; 1 for a dense model."""
    return max(1, shape.experts // ps.get_expert_model_parallel_world_size())


def held_slots(family: Family, shape: ModelShape, seat: Seat, *, trunk: bool = False) -> Iterator[Slot]:
    """What this rank must have, in the table's order; with pipelined tied embeddings, the last stage's copy too. trunk: no output layer."""
    count = experts_per_rank(shape)
    for slot in family.slots(shape):
        if trunk and (slot.mapping.part == "head" or (slot.mapping.part == "embedding" and not seat.first)):
            continue
        if seat.holds(slot, count) or (slot.mapping.part == "embedding" and shape.tied and seat.last):
            yield slot


def held_parameters(chunks: Sequence[nn.Module], family: Family, shape: ModelShape, *, trunk: bool = False) -> dict[Key, Tensor]:
    """Every parameter of this rank, and every buffer that the family knows, under its slot's key, names and shapes checked.

    trunk: all but the value head.

    Raises:
        ValueError: the model has a parameter that the family does not know, lacks one, or has one of another shape.
    """
    rows = {name: mapping.key for mapping in family.tensors for name in mapping.mcore}
    first_expert = ps.get_expert_model_parallel_rank() * experts_per_rank(shape)
    found: dict[Key, Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        numbers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if trunk and name.startswith("value_head."):
                continue
            key = _key(name, rows, numbers, first_expert, shape.tied)
            if key is None:
                if isinstance(tensor, nn.Parameter):
                    raise ValueError(f"the model's parameter {name} has no counterpart in {family.name}")
                continue
            assert key not in found, f"{name} is the second parameter for {key}"
            found[key] = tensor
    _check_complete(found, list(held_slots(family, shape, own_seat(chunks), trunk=trunk)), family, shape)
    return found


def _key(name: str, rows: dict[str, str], layers: dict[int, int], first_expert: int, tied: bool) -> Key | None:
    """The key of the slot that a live parameter belongs to."""
    layer = _LAYER.search(name)
    expert = _EXPERT.search(name)
    pattern = _LAYER.sub("{layer}", _EXPERT.sub("{expert}", name))
    if tied and name == "output_layer.weight":
        pattern = "embedding.word_embeddings.weight"
    if pattern not in rows:
        return None
    return (
        rows[pattern],
        layers[int(layer.group())] if layer else None,
        first_expert + int(expert.group()) if expert else None,
    )


def _check_complete(found: Mapping[Key, Tensor], slots: Sequence[Slot], family: Family, shape: ModelShape) -> None:
    expected, rank = {slot.key: slot for slot in slots}, dist.get_rank()
    for key, slot in expected.items():
        if key not in found:
            raise ValueError(f"the model on rank {rank} lacks {slot}, which {family.name} has")
        wanted = slot.mapping.layout.shard_shape(slot.hf_shapes(shape), shape, parts(slot))
        if tuple(found[key].shape) != wanted:
            raise ValueError(f"the model's {slot} has shape {tuple(found[key].shape)}, but config.json makes it {wanted}")
    for key in found.keys() - expected.keys():
        raise ValueError(f"the model on rank {rank} has {key}, which config.json does not")
