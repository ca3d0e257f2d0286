"""Attention over a paged cache for a whole batch of requests, in plain torch. ``attention_backend`` gives it to SGLang.

SGLang's CPU backend calls scaled_dot_product_attention once a request and layer, which is most of a decode step at batch 128.
Here requests of similar length form a group, a group is padded to its longest member, and one masked call serves it. Which
slots, rows and masks a group needs does not depend on the layer, so it is planned once a forward pass.

Shape suffixes: N cache slots, R rows of the token table, B requests in a group, Q new tokens of a request (padded), L tokens
in its cache (padded), T new tokens in the batch, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

SMALLEST_CACHE_BUCKET = 128
"""Below this many cached tokens a second group costs more than the padding it saves (measured at hidden size 128)."""
SMALLEST_QUERY_BUCKET = 16


def _bucket(length: int, smallest: int) -> int:
    """Round up to a power of two: members of a bucket differ by less than 2x, which bounds padding to half of a group."""
    return max(smallest, 1 << (length - 1).bit_length())


@dataclass(frozen=True)
class Group:
    """Requests attended to in one call, padded to the longest."""

    slots_BL: torch.Tensor
    """[B, L] int64: where each token's key and value live. Padding repeats the request's first slot, whose content is
    finite; a stale slot might hold anything, and 0 * NaN is NaN."""
    bias_BQL: torch.Tensor | None
    """[B, Q, L] fp32: 0 where a query sees a key, -inf elsewhere. None: causal from position 0, which needs no mask."""
    rows_BQ: torch.Tensor | None
    """[B, Q] int64: row of each query in the batch's [T, ...] tensors; padding repeats a row. None: the batch as it stands."""
    keep_BQ: torch.Tensor | None
    """[B, Q] bool: which of ``rows_BQ`` are real. None: all."""


def plan_decode(req_to_token_RL: torch.Tensor, req_rows: torch.Tensor, cache_lens: list[int]) -> list[Group]:
    """Group the requests of a decode step, one new token each.

    Args:
        req_to_token_RL: [R, context] int32, cache slot of each position.
        req_rows: [batch] int, the table row of each request.
        cache_lens: tokens in the cache of each request, the new one included.
    """
    groups = []
    for members in _by_bucket([(_bucket(length, SMALLEST_CACHE_BUCKET),) for length in cache_lens]):
        lens_B = torch.tensor([cache_lens[i] for i in members])
        whole_batch = len(members) == len(cache_lens)
        slots_BL = _slots(req_to_token_RL, req_rows if whole_batch else req_rows[members], lens_B)
        visible_BL = torch.arange(slots_BL.shape[1]) < lens_B[:, None]
        rows_BQ = None if whole_batch else torch.tensor(members)[:, None]
        groups.append(Group(slots_BL, _bias(visible_BL)[:, None, :], rows_BQ, None))
    return groups


def plan_extend(req_to_token_RL: torch.Tensor, req_rows: torch.Tensor, prefix_lens: list[int], new_lens: list[int]) -> list[Group]:
    """Group the requests of a prefill, ``new_lens`` tokens each behind ``prefix_lens`` cached ones.

    The groups' ``rows_BQ`` index the batch's tokens, which stand request after request. Arguments as in ``plan_decode``.
    """
    starts = [sum_before - new for sum_before, new in zip(torch.tensor(new_lens).cumsum(0).tolist(), new_lens, strict=True)]
    keys = [
        (_bucket(new, SMALLEST_QUERY_BUCKET), _bucket(prefix + new, SMALLEST_CACHE_BUCKET), prefix == 0)
        for prefix, new in zip(prefix_lens, new_lens, strict=True)
    ]
    groups = []
    for members in _by_bucket(keys):
        prefix_B, new_B, start_B = (torch.tensor([values[i] for i in members]) for values in (prefix_lens, new_lens, starts))
        slots_BL = _slots(req_to_token_RL, req_rows[members], prefix_B + new_B)
        query_Q = torch.arange(int(new_B.max()))
        rows_BQ = start_B[:, None] + torch.minimum(query_Q, new_B[:, None] - 1)
        keep_BQ = query_Q < new_B[:, None]
        bias_BQL = None
        if prefix_B.any():
            # A real query at position p sees keys up to p, so this one comparison also hides the padded keys from it.
            position_BQ = prefix_B[:, None] + query_Q
            bias_BQL = _bias(torch.arange(slots_BL.shape[1]) <= position_BQ[:, :, None])
        groups.append(Group(slots_BL, bias_BQL, rows_BQ, None if bool(keep_BQ.all()) else keep_BQ))
    return groups


def _by_bucket(keys: list[tuple[Any, ...]]) -> list[list[int]]:
    """Indices of equal keys, in order of first appearance."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    return list(members.values())


def _slots(req_to_token_RL: torch.Tensor, req_rows_B: torch.Tensor, lens_B: torch.Tensor) -> torch.Tensor:
    """[B, max(lens)] int64 cache slots, padding pointing at each request's first slot."""
    longest = int(lens_B.max())
    slots_BL = req_to_token_RL[:, :longest].index_select(0, req_rows_B).long()
    return torch.where(torch.arange(longest) < lens_B[:, None], slots_BL, slots_BL[:, :1])


def _bias(visible: torch.Tensor) -> torch.Tensor:
    """Additive fp32 mask: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def attend(
    group: Group, query_THD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, scale: float, out_THD: torch.Tensor
) -> None:
    """Attend for the queries of one group and write their rows of ``out_THD``.

    Args:
        query_THD: [T, H, D], new tokens of the whole batch.
        key_NKD, value_NKD: [N, K, D], the layer's cache, new tokens already written.
        scale: factor on the scores.
        out_THD: [T, H, D_value], written in place.
    """
    batch, cached = group.slots_BL.shape
    kv_heads = key_NKD.shape[1]
    query_BQHD = query_THD[:, None] if group.rows_BQ is None else query_THD[group.rows_BQ]
    queries, heads = query_BQHD.shape[1:3]
    flat_slots = group.slots_BL.flatten()
    # index_select over rows of a matrix copies each row in one piece; indexing the 3-D cache is ten times slower.
    key_BKLD, value_BKLD = (
        cache.flatten(1).index_select(0, flat_slots).view(batch, cached, kv_heads, -1).transpose(1, 2).to(query_THD.dtype)
        for cache in (key_NKD, value_NKD)
    )
    if queries == 1 and group.bias_BQL is not None:
        # Heads that share a key head ride along as that head's queries: nothing is repeated for grouped-query attention.
        grouped = query_BQHD.view(batch, kv_heads, heads // kv_heads, -1)
        shared = group.bias_BQL[:, None].to(query_THD.dtype).expand(-1, 1, heads // kv_heads, -1)
        out_BQHD = scaled_dot_product_attention(grouped, key_BKLD, value_BKLD, attn_mask=shared, scale=scale).reshape(batch, 1, heads, -1)
    else:
        bias = None if group.bias_BQL is None else group.bias_BQL[:, None].to(query_THD.dtype)
        out_BQHD = scaled_dot_product_attention(
            query_BQHD.transpose(1, 2), key_BKLD, value_BKLD, bias, is_causal=bias is None, scale=scale, enable_gqa=heads != kv_heads
        ).transpose(1, 2)
    if group.rows_BQ is None:
        out_THD.copy_(out_BQHD[:, 0])
    elif group.keep_BQ is None:
        out_THD[group.rows_BQ] = out_BQHD
    else:
        out_THD[group.rows_BQ[group.keep_BQ]] = out_BQHD[group.keep_BQ]
