"""How the tensors of a Hugging Face checkpoint lie inside Megatron's: pure functions between the two, and over tensor-parallel shards.

Each layout is two pairs of inverses, on any device and dtype, exact because they only move values:
  full_from_hf / hf_from_full   several Hugging Face tensors <-> the one tensor that Megatron would hold without parallelism
  shard / unshard               that full tensor <-> the pieces of `parts` tensor-parallel ranks

Sizes: V vocabulary, P padded vocabulary, H hidden, D head dimension, G query groups (key-value heads), F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


def raw(tensor: Tensor) -> memoryview:
    """The values of a contiguous tensor on the host, as the bytes that they are in memory; writing to these changes the tensor."""
    values: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(values)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one checkpoint, under the symbols that the tables of `families` use."""

    layers: int
    vocab: int
    """V, as the tokenizer and the Hugging Face checkpoint have it."""
    padded_vocab: int
    """P, rows of Megatron's embedding: V rounded up so that tensor parallelism divides it."""
    hidden: int
    heads: int
    groups: int
    """G."""
    head_dim: int
    ffn: int
    """F of a dense layer."""
    moe_ffn: int
    """F of one expert; 0 for a dense model."""
    experts: int
    """0 for a dense model."""
    moe_layers: tuple[bool, ...]
    """Which layers route, by depth."""
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    shared_ffn: int = 0
    """F of all shared experts of a layer together; 0 without."""
    query_rank: int = 0
    """Latent attention: width of the compressed queries; 0 where queries come straight from the hidden state."""
    key_rank: int = 0
    """Latent attention: width of the compressed keys and values, without their rotary part."""
    rotary: int = 0
    """Latent attention: the rotary part of a head's `head_dim`."""
    value_dim: int = 0
    """Latent attention: width of a head's value."""

    one = 1

    @property
    def gate_and_up(self) -> int:
        """Columns of an expert's gate and up together."""
        return 2 * self.moe_ffn

    @property
    def query(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Rows of k_proj and of v_proj."""
        return self.groups * self.head_dim

    @property
    def direct_query(self) -> bool:
        """Whether latent attention leaves its queries uncompressed."""
        return self.query_rank == 0

    @property
    def latent_down(self) -> int:
        """Rows of kv_a_proj_with_mqa: compressed keys and values, and the rotary key that all heads share."""
        return self.key_rank + self.rotary

    @property
    def latent_up(self) -> int:
        """Rows of kv_b_proj: each head's key without its rotary part, then its value."""
        return self.heads * (self.head_dim - self.rotary + self.value_dim)

    @property
    def value(self) -> int:
        """Columns of o_proj under latent attention."""
        return self.heads * self.value_dim

    def resolve(self, symbols: Sequence[str]) -> Shape:
        """Symbols such as ("query", "hidden") as numbers."""
        return tuple(getattr(self, symbol) for symbol in symbols)


@dataclass(frozen=True)
class Layout:
    """One Hugging Face tensor that Megatron holds as it is, whole or divided along `axis`."""

    kind: str
    axis: int | None
    """Axis of the full tensor that tensor-parallel ranks divide; None where each holds all of it."""

    def full_from_hf(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """The tensor of a Megatron model without parallelism."""
        (tensor,) = tensors
        return tensor

    def hf_from_full(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        """Inverse of `full_from_hf`."""
        return (full,)

    def shard(self, full: Tensor, parts: int, index: int) -> Tensor:
        """What tensor-parallel rank `index` of `parts` holds."""
        return full if self.axis is None else full.chunk(parts, self.axis)[index]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of `shard`, from the pieces in order of rank; one piece is enough where nothing is divided."""
        return shards[0] if self.axis is None or len(shards) == 1 else torch.cat(list(shards), self.axis)

    def full_shape(self, hf_shapes: Sequence[Shape], shape: ModelShape) -> Shape:
        """Shape of `full_from_hf` for tensors of `hf_shapes`."""
        return (sum(s[0] for s in hf_shapes), *hf_shapes[0][1:])

    def shard_shape(self, hf_shapes: Sequence[Shape], shape: ModelShape, parts: int) -> Shape:
        """Shape of every `shard`; the axis is assumed to divide."""
        full = self.full_shape(hf_shapes, shape)
        return tuple(size // parts if axis == self.axis else size for axis, size in enumerate(full))


@dataclass(frozen=True)
class VocabLayout(Layout):
    """[V, H] <-> [P, H]: rows beyond the vocabulary are zero in Megatron and absent from Hugging Face."""

    def full_from_hf(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = tensors
        if shape.padded_vocab == shape.vocab:
            return tensor
        padding = tensor.new_zeros(shape.padded_vocab - shape.vocab, *tensor.shape[1:])
        return torch.cat([tensor, padding])

    def hf_from_full(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (full[: shape.vocab],)

    def full_shape(self, hf_shapes: Sequence[Shape], shape: ModelShape) -> Shape:
        return (shape.padded_vocab, *hf_shapes[0][1:])


@dataclass(frozen=True)
class QkvLayout(Layout):
    """q [heads D, H], k [G D, H], v [G D, H] <-> for each query group in turn: its queries, its key, its value."""

    def full_from_hf(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        tail = tensors[0].shape[1:]
        by_group = [t.reshape(shape.groups, -1, *tail) for t in tensors]
        return torch.cat(by_group, 1).reshape(-1, *tail)

    def hf_from_full(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        tail = full.shape[1:]
        rows = [shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim]
        by_group = full.reshape(shape.groups, sum(rows), *tail).split(rows, 1)
        return tuple(t.reshape(-1, *tail) for t in by_group)


@dataclass(frozen=True)
class GateUpLayout(Layout):
    """gate [F, H], up [F, H] <-> [2 F, H]; a rank holds its rows of gate, then its rows of up."""

    def full_from_hf(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return torch.cat(list(tensors))

    def hf_from_full(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return tuple(full.chunk(2))

    def shard(self, full: Tensor, parts: int, index: int) -> Tensor:
        return torch.cat([half.chunk(parts)[index] for half in full.chunk(2)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])


@dataclass(frozen=True)
class TransposedLayout(Layout):
    """[F, H] <-> [H, F]."""

    def full_from_hf(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = tensors
        return tensor.t()

    def hf_from_full(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (full.t(),)

    def full_shape(self, hf_shapes: Sequence[Shape], shape: ModelShape) -> Shape:
        (size,) = hf_shapes
        return size[::-1]


@dataclass(frozen=True)
class AlternatingLayout(GateUpLayout):
    """[H, 2 F] or [2 F] in which gate and up alternate <-> [2 F, H] or [2 F], gate and then up."""

    def full_from_hf(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        (tensor,) = tensors
        return torch.cat([tensor.t()[::2], tensor.t()[1::2]])

    def hf_from_full(self, full: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
        return (torch.stack(full.chunk(2), 1).flatten(0, 1).t(),)

    def full_shape(self, hf_shapes: Sequence[Shape], shape: ModelShape) -> Shape:
        (size,) = hf_shapes
        return size[::-1]


REPLICATED = Layout("replicated", None)
COLUMN = Layout("column", 0)
ROW = Layout("row", 1)
VOCAB = VocabLayout("vocab", 0)
QKV = QkvLayout("qkv", 0)
GATE_UP = GateUpLayout("gate-up", 0)
TRANSPOSED_ROW = TransposedLayout("transposed-row", 1)
ALTERNATING_GATE_UP = AlternatingLayout("alternating-gate-up", 0)
