"""Layouts by hand on small tensors of distinct values, then as inverses over every number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl.convert.layouts import (
    ALTERNATING_GATE_UP,
    COLUMN,
    GATE_UP,
    QKV,
    REPLICATED,
    ROW,
    TRANSPOSED_ROW,
    VOCAB,
    Layout,
    ModelShape,
    Shape,
)

SHAPE = ModelShape(
    layers=3,
    vocab=5,
    padded_vocab=8,
    hidden=3,
    heads=4,
    groups=2,
    head_dim=1,
    ffn=4,
    moe_ffn=2,
    experts=4,
    moe_layers=(True, False, True),
    tied=False,
)
WIDE = replace(SHAPE, vocab=509, padded_vocab=512, hidden=12, heads=16, groups=8, head_dim=5, ffn=24)
TENSORS: dict[str, list[Shape]] = {
    "replicated": [(12,)],
    "column": [(24, 12)],
    "row": [(12, 24)],
    "vocab": [(509, 12)],
    "qkv": [(80, 12), (40, 12), (40, 12)],
    "gate-up": [(24, 12), (24, 12)],
    "alternating-gate-up": [(12, 48)],
    "transposed-row": [(24, 12)],
}
LAYOUTS = [REPLICATED, COLUMN, ROW, VOCAB, QKV, GATE_UP, ALTERNATING_GATE_UP, TRANSPOSED_ROW]


def counted(*shape: int, start: int = 0) -> Tensor:
    """Distinct values from `start` on."""
    return torch.arange(start, start + torch.Size(shape).numel()).view(shape)


def test_qkv_interleaves_by_query_group() -> None:
    # 4 query heads of 1 row, 2 groups: heads 0 and 1 belong to group 0. Each row is its first value: q 0-3, k 10-11, v 20-21.
    q, k, v = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11]]), torch.tensor([[20], [21]])
    full = QKV.full_from_hf([q, k, v], SHAPE)
    assert full.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert QKV.shard(full, 2, 1).flatten().tolist() == [2, 3, 11, 21]


def test_gate_up_shards_each_half() -> None:
    gate, up = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11], [12], [13]])
    full = GATE_UP.full_from_hf([gate, up], SHAPE)
    assert full.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [GATE_UP.shard(full, 2, i).flatten().tolist() for i in (0, 1)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_alternating_gate_up_comes_apart_and_is_transposed() -> None:
    # Two inputs (rows 0 and 10), columns gate 0, up 0, gate 1, up 1.
    tensor = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])
    full = ALTERNATING_GATE_UP.full_from_hf([tensor], SHAPE)
    assert full.tolist() == [[0, 10], [2, 12], [1, 11], [3, 13]]
    assert ALTERNATING_GATE_UP.shard(full, 2, 1).tolist() == [[2, 12], [3, 13]]
    (back,) = ALTERNATING_GATE_UP.hf_from_full(torch.tensor([0, 2, 1, 3]), SHAPE)  # a bias
    assert back.tolist() == [0, 1, 2, 3]


def test_vocab_pads_with_zero_rows_and_drops_them() -> None:
    full = VOCAB.full_from_hf([counted(5, 3, start=1)], SHAPE)
    assert full.shape == (8, 3)
    assert full[4].tolist() == [13, 14, 15]  # the last row of the vocabulary
    assert full[5:].tolist() == [[0, 0, 0]] * 3
    full[5:] = 7  # what padding rows hold after training does not matter
    assert torch.equal(VOCAB.hf_from_full(full, SHAPE)[0], counted(5, 3, start=1))


def test_row_divides_columns_and_column_divides_rows() -> None:
    full = counted(2, 4)
    assert ROW.shard(full, 2, 1).tolist() == [[2, 3], [6, 7]]
    assert COLUMN.shard(full, 2, 1).tolist() == [[4, 5, 6, 7]]
    assert torch.equal(REPLICATED.shard(full, 2, 1), full)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_both_pairs_are_inverses_and_shapes_are_foretold(layout: Layout, ranks: int) -> None:
    sizes = TENSORS[layout.kind]
    tensors = [counted(*size, start=100_000 * i) for i, size in enumerate(sizes)]
    full = layout.full_from_hf(tensors, WIDE)
    shards = [layout.shard(full, ranks, rank) for rank in range(ranks)]
    assert full.shape == layout.full_shape(sizes, WIDE)
    assert {tuple(shard.shape) for shard in shards} == {layout.shard_shape(sizes, WIDE, ranks)}
    back = layout.hf_from_full(layout.unshard(shards), WIDE)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_latent_sizes() -> None:
    # 4 heads of 5, of which 2 are rotary; values of 3; keys and values compressed to 7: 7 + 2 rows down, 4 x (5 - 2 + 3) up.
    shape = replace(WIDE, heads=4, head_dim=5, rotary=2, value_dim=3, key_rank=7)
    assert shape.resolve(["latent_down", "latent_up", "value", "query"]) == (9, 24, 12, 20)
    assert shape.direct_query and not replace(shape, query_rank=6).direct_query
