"""Weights between a Hugging Face folder and a live Megatron model, in any layout over ranks.

Both directions walk the slots of the family's table in its one order, so every rank takes part in the same exchanges in the same
order. Values are only moved, so a round trip in one dtype is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .families import family_for
from .family import Family, Slot
from .hf import HfReader
from .layouts import ModelShape, Shape
from .live import Key, Seat, experts_per_rank, held_parameters, held_slots, live_shape, own_seat, part_index, parts
from .source import Source

BUCKET_BYTES = 256 * 1024 * 1024
"""Default size of one exchange; it also bounds the extra memory of rank 0."""
EXCHANGE_TIMEOUT = timedelta(minutes=30)
"""Default for how long one exchange may take, from when a rank is ready for it."""


@torch.no_grad()
def load_hf(models: Sequence[nn.Module], folder: str | Path, *, trunk: bool = False) -> None:
    """Fills every parameter of this rank from a checkpoint. No communication: each rank reads what it needs.

    Values are cast to the parameters' dtype. Build the optimizer afterwards, or its fp32 copies keep the old weights.

    Args:
        models: this rank's GPTModel chunks, in Megatron's wrappers or not.
        folder: holds config.json and safetensors, experts one by one or fused.
        trunk: the models have a value head in place of the output layer; it is left as it is.

    Raises:
        ValueError: unsupported architecture or config field; a tensor that is missing, left over, of another shape or damaged;
            a model that was built for another config.json.
    """
    reader = HfReader(folder)
    family = family_for(reader.config)
    shape = live_shape(family, reader.config, models)
    source = Source(reader, family, shape)
    parameters = held_parameters(models, family, shape, trunk=trunk)
    seat = own_seat(models)
    for slot in held_slots(family, shape, seat, trunk=trunk):
        layout = slot.mapping.layout
        full = layout.full_from_hf([source.tensor(name) for name in slot.hf_names], shape)
        parameters[slot.key].copy_(layout.shard(full, parts(slot), part_index(slot, seat)))


def export_hf(
    models: Sequence[nn.Module],
    hf: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: timedelta = EXCHANGE_TIMEOUT,
) -> Iterator[tuple[str, Tensor | None]]:
    """The whole model's tensors under their Hugging Face names, in the same order on every rank. Collective: all ranks must drain it.

    One rank of each set of replicas sends its shards straight to global rank 0, in buckets. The tensors are copies: a later
    optimizer step does not change them. With an optimizer that overlaps its parameter all-gather, finish that first.

    Args:
        models: this rank's GPTModel chunks, in Megatron's wrappers or not.
        hf: the checkpoint's config.json.
        dtype: of the tensors, except those whose row in the family's table has one; None takes the trainer's params_dtype.
        bucket_bytes: size of one exchange and of the extra memory of rank 0; one tensor alone may exceed it.
        timeout: of one exchange.

    Yields:
        (name, tensor) on global rank 0, on the model's device; (name, None) on the others.

    Raises:
        ValueError: the model was not built for `hf`.
        RuntimeError: an exchange failed or timed out; the message names its first and last tensor.
    """
    family = family_for(hf)
    shape = live_shape(family, hf, models)
    exchange = _Exchange(_all_seats(models), held_parameters(models, family, shape), shape, dtype or models_dtype(models), timeout)
    yield from _fuse(_export(exchange, family, shape, bucket_bytes), family, shape)


Named = tuple[str, Tensor | None]


def _export(exchange: _Exchange, family: Family, shape: ModelShape, bucket_bytes: int) -> Iterator[Named]:
    """Under the table's names."""
    for bucket in _buckets(family.slots(shape), shape, bucket_bytes // exchange.dtype.itemsize):
        shards = exchange.gather(bucket)
        for number, slot in enumerate(bucket):
            if shards is None:
                yield from ((name, None) for name in slot.hf_names)
                continue
            layout = slot.mapping.layout
            full = layout.unshard(shards[number])
            yield from zip(slot.hf_names, layout.hf_from_full(full, shape), strict=True)


def _fuse(weights: Iterator[Named], family: Family, shape: ModelShape) -> Iterator[Named]:
    """Stacks what the family's checkpoints hold for all experts of a layer together."""
    whole = family.written_together(shape)
    waiting: dict[str, list[Tensor | None]] = {}
    for name, tensor in weights:
        if name not in whole:
            yield name, tensor
            continue
        pieces = waiting.setdefault(whole[name], [])
        pieces.append(tensor)
        if len(pieces) == shape.experts:
            del waiting[whole[name]]
            yield whole[name], None if tensor is None else torch.stack([piece for piece in pieces if piece is not None])
    assert not waiting, f"too few experts for {sorted(waiting)}"


def models_dtype(models: Sequence[nn.Module]) -> torch.dtype:
    """The dtype the trainer holds its parameters in."""
    return next(models[0].parameters()).dtype


def _all_seats(models: Sequence[nn.Module]) -> list[Seat]:
    seats: list[Any] = [own_seat(models)] * dist.get_world_size()
    if len(seats) > 1:
        dist.all_gather_object(seats, own_seat(models))
    return seats


def _buckets(slots: Iterator[Slot], shape: ModelShape, limit: int) -> Iterator[list[Slot]]:
    """Runs of slots of one dtype and at most `limit` elements together, or one slot alone."""
    bucket: list[Slot] = []
    filled = 0
    for slot in slots:
        size = _elements(slot.mapping.layout.full_shape(slot.hf_shapes(shape), shape))
        if bucket and (filled + size > limit or slot.mapping.dtype != bucket[0].mapping.dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(slot)
        filled += size
    yield bucket


def _elements(size: Shape) -> int:
    return torch.Size(size).numel()


class _Exchange:
    """Brings the shards of a bucket to global rank 0, one message a sender."""

    def __init__(
        self, seats: Sequence[Seat], parameters: Mapping[Key, Tensor], shape: ModelShape, dtype: torch.dtype, timeout: timedelta
    ) -> None:
        self._seats = seats
        self._timeout = timeout
        self._parameters = parameters
        self._shape = shape
        self._experts_per_rank = experts_per_rank(shape)
        self._rank = dist.get_rank()
        self._device = next(iter(parameters.values())).device
        self._owners: dict[tuple[Any, ...], list[int]] = {}
        self.dtype = dtype

    def owners(self, slot: Slot) -> list[int]:
        """For each shard of a slot, the lowest rank that holds it."""
        divided = parts(slot) if slot.mapping.layout.axis is not None else 1
        expert_rank = None if slot.expert is None else slot.expert // self._experts_per_rank
        where = (slot.layer, slot.mapping.part if slot.layer is None else None, expert_rank, divided)
        if where not in self._owners:
            holders = [seat for seat in self._seats if seat.holds(slot, self._experts_per_rank)]
            self._owners[where] = [min(seat.rank for seat in holders if part_index(slot, seat) == part) for part in range(divided)]
        return self._owners[where]

    def gather(self, bucket: Sequence[Slot]) -> list[list[Tensor]] | None:
        """The shards of each slot, in order, on rank 0; None elsewhere."""
        messages, dtype = self._messages(bucket), bucket[0].mapping.dtype or self.dtype
        mine = messages.get(self._rank, [])
        flat = torch.cat([self._parameters[slot.key].detach().reshape(-1).to(dtype) for slot in mine]) if mine else None
        try:
            if self._rank != 0:
                if flat is not None:
                    _complete([dist.P2POp(dist.isend, flat, 0)], self._timeout)
                return None
            received = self._receive(messages, dtype)
        except RuntimeError as error:
            span = f"{bucket[0]} .. {bucket[-1]}" if len(bucket) > 1 else f"{bucket[0]}"
            senders = sorted(sender for sender in messages if sender != 0)
            raise RuntimeError(f"gathering {span} from ranks {senders} on rank 0 failed on rank {self._rank}: {error}") from error
        if flat is not None:
            received[0] = flat
        return self._cut(bucket, messages, received)

    def _messages(self, bucket: Sequence[Slot]) -> dict[int, list[Slot]]:
        """Which slots each sender's message holds a shard of, in order."""
        messages: dict[int, list[Slot]] = {}
        for slot in bucket:
            for owner in self.owners(slot):
                messages.setdefault(owner, []).append(slot)
        return messages

    def _receive(self, messages: Mapping[int, Sequence[Slot]], dtype: torch.dtype) -> dict[int, Tensor]:
        received = {
            sender: torch.empty(sum(self._shard_sizes(slots)), dtype=dtype, device=self._device)
            for sender, slots in messages.items()
            if sender != 0
        }
        if received:
            _complete([dist.P2POp(dist.irecv, buffer, sender) for sender, buffer in received.items()], self._timeout)
        return received

    def _shard_shape(self, slot: Slot) -> Shape:
        return slot.mapping.layout.shard_shape(slot.hf_shapes(self._shape), self._shape, parts(slot))

    def _shard_sizes(self, slots: Sequence[Slot]) -> list[int]:
        return [_elements(self._shard_shape(slot)) for slot in slots]

    def _cut(self, bucket: Sequence[Slot], messages: Mapping[int, Sequence[Slot]], received: Mapping[int, Tensor]) -> list[list[Tensor]]:
        pieces = {sender: iter(received[sender].split(self._shard_sizes(slots))) for sender, slots in messages.items()}
        return [[next(pieces[owner]).view(self._shard_shape(slot)) for owner in self.owners(slot)] for slot in bucket]


def _complete(operations: list[dist.P2POp], timeout: timedelta) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait(timeout)
