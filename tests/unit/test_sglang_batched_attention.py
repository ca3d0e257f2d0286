"""Attention for a whole batch equals attention for each request alone, whatever the lengths and whatever the padding holds."""

from __future__ import annotations

import pytest
import torch
from megatron_rl_patches.sglang.batched_attention import SMALLEST_CACHE_BUCKET, Group, attend, plan_decode, plan_extend
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SLOTS, CONTEXT = 4096, 512
SCALE = 0.37  # not 1/sqrt(D): a factor that is dropped must show
TOLERANCE = 2e-6  # fp32, values of order 1, sums of at most 512 terms


class Cache:
    """A paged cache for requests of given lengths: slots in random order, NaN in every slot no request owns."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(SLOTS, generator=generator)
        self.table = free[torch.randint(SLOTS, (len(lengths) + 3, CONTEXT), generator=generator)].int()  # stale entries: any slot
        self.rows = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
        self.keys = torch.full((SLOTS, KV_HEADS, HEAD_DIM), float("nan"))
        self.values = self.keys.clone()
        taken = 0
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            slots = free[taken : taken + length]
            self.table[row, :length] = slots.int()
            for cache in (self.keys, self.values):
                cache[slots] = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
            taken += length
        self.generator = generator

    def one_by_one(self, query_THD: torch.Tensor, prefix_lens: list[int], new_lens: list[int]) -> torch.Tensor:
        """Each request alone, its own mask written out from the definition: query at position p sees keys 0..p."""
        outputs, start = [], 0
        for row, prefix, new in zip(self.rows.tolist(), prefix_lens, new_lens, strict=True):
            slots = self.table[row, : prefix + new].long()
            key, value = (cache[slots].repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for cache in (self.keys, self.values))
            visible = torch.arange(prefix + new)[None, :] <= torch.arange(prefix, prefix + new)[:, None]
            query = query_THD[start : start + new].transpose(0, 1)
            outputs.append(scaled_dot_product_attention(query, key, value, visible, scale=SCALE).transpose(0, 1))
            start += new
        return torch.cat(outputs)

    def batched(self, groups: list[Group], query_THD: torch.Tensor) -> torch.Tensor:
        out_THD = torch.full_like(query_THD, float("nan"))  # a row that is never written must show
        for group in groups:
            attend(group, query_THD, self.keys, self.values, SCALE, out_THD)
        return out_THD


@pytest.mark.parametrize(
    "lengths",
    [[1], [5, 5, 5], [1, 40, 100, 128], [3, 200, 17, 129, 400, 256, 257], [SMALLEST_CACHE_BUCKET, SMALLEST_CACHE_BUCKET + 1]],
    ids=["one", "equal", "one-bucket", "ragged", "bucket-edge"],
)
def test_decode_equals_one_by_one(lengths: list[int]) -> None:
    cache = Cache(lengths)
    query = torch.randn(len(lengths), HEADS, HEAD_DIM, generator=cache.generator)
    out = cache.batched(plan_decode(cache.table, cache.rows, lengths), query)
    expected = cache.one_by_one(query, [length - 1 for length in lengths], [1] * len(lengths))
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"),
    [
        ([0], [7]),
        ([0, 0, 0], [1, 7, 16]),
        ([0, 30, 0, 200, 5], [40, 1, 3, 17, 100]),
        ([64, 64, 64], [1, 1, 1]),
        ([9, 0, 130, 129], [33, 33, 1, 5]),
    ],
    ids=["one", "no-prefix", "mixed", "all-but-one-cached", "bucket-edge"],
)
def test_extend_equals_one_by_one(prefix_lens: list[int], new_lens: list[int]) -> None:
    cache = Cache([prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)])
    query = torch.randn(sum(new_lens), HEADS, HEAD_DIM, generator=cache.generator)
    out = cache.batched(plan_extend(cache.table, cache.rows, prefix_lens, new_lens), query)
    torch.testing.assert_close(out, cache.one_by_one(query, prefix_lens, new_lens), rtol=0, atol=TOLERANCE)


def test_similar_lengths_share_a_call_and_padding_stays_below_a_half() -> None:
    lengths = [100, 128, 129, 250, 256, 300, 511]
    groups = plan_decode(torch.zeros(8, CONTEXT, dtype=torch.int32), torch.arange(7), lengths)
    # Buckets end at 128, 256 and 512: two, three and two requests, each group padded to its own longest.
    assert [tuple(group.slots_BL.shape) for group in groups] == [(2, 128), (3, 256), (2, 511)]
    padded = sum(group.slots_BL.numel() for group in groups)
    assert padded < 2 * sum(lengths)


def test_plain_prefill_needs_no_mask_tensor() -> None:
    (group,) = plan_extend(torch.zeros(3, CONTEXT, dtype=torch.int32), torch.arange(3), [0, 0, 0], [9, 12, 16])
    assert group.bias_BQL is None
