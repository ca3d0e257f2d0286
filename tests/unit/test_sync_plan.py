"""Buckets, casts and checksums of weight updates."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.sync.checksums import Checksums, tensor_hash
from megatron_rl.sync.plan import buckets, cast, mark_last


def cut(flat: Tensor, dtype: torch.dtype, shapes: list[list[int]]) -> list[Tensor]:
    """What the receiving side does, from the request alone."""
    out, at = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        out.append(flat[at : at + size].view(dtype).reshape(shape))
        at += size
    assert at == flat.numel()
    return out


@settings(deadline=None, max_examples=50)  # the first call into torch takes as long as it takes
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16])), max_size=20), st.integers(1, 200))
def test_buckets_keep_every_weight_in_order(sizes: list[tuple[int, torch.dtype]], limit: int) -> None:
    weights = [(f"w{i}", torch.randn(n).to(dtype)) for i, (n, dtype) in enumerate(sizes)]
    received = []
    for bucket in buckets(iter(weights), limit):
        assert bucket.flat.numel() <= limit or len(bucket.names) == 1
        request = bucket.request()
        assert set(request["dtypes"]) == {str(bucket.dtype).removeprefix("torch.")}
        received += list(zip(request["names"], cut(bucket.flat, bucket.dtype, request["shapes"]), strict=True))
    assert [name for name, _ in received] == [name for name, _ in weights]
    for (_, got), (_, sent) in zip(received, weights, strict=True):
        assert got.dtype == sent.dtype
        torch.testing.assert_close(got, sent, rtol=0, atol=0)


def test_limit_in_bytes() -> None:
    """Three weights of 40 bytes under a limit of 80: two, then one."""
    weights = [(f"w{i}", torch.zeros(10)) for i in range(3)]
    assert [len(bucket.names) for bucket in buckets(iter(weights), 80)] == [2, 1]


def test_matrix_shapes_and_strides() -> None:
    """A transposed view travels as what it looks like, not as it lies in memory."""
    weight = torch.arange(6.0).reshape(2, 3).T
    (bucket,) = buckets(cast([("w", weight)], torch.float32), 1000)
    assert bucket.shapes == ((3, 2),)
    assert bucket.flat.view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]


def test_cast_keeps_expert_bias() -> None:
    names = dict(cast([("a.weight", torch.ones(2)), ("gate.e_score_correction_bias", torch.ones(2))], torch.bfloat16))
    assert [tensor.dtype for tensor in names.values()] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_mark_last(count: int) -> None:
    found = list(mark_last(buckets([(f"w{i}", torch.zeros(1)) for i in range(count)], 1)))
    assert [last for _, last in found] == [False] * (count - 1) + [True] * min(count, 1)


def test_hash_is_sha256_over_joined_bytes() -> None:
    parts = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    raw = bytes.fromhex("0000803f0000004000004040")  # 1, 2, 3 in little-endian fp32
    assert tensor_hash(parts) == hashlib.sha256(raw).hexdigest()[:16]


def test_parts_are_joined_in_the_engines_order() -> None:
    """Arriving as v, q, k and up before gate, they are hashed as q, k, v and gate over up for each expert."""
    t = {name: torch.randn(2, 2) for name in "qkv"} | {f"{kind}{e}": torch.randn(2, 2) for kind in ("gate", "up", "down") for e in (0, 1)}
    arriving = [("l.attn.v_proj.weight", t["v"]), ("l.attn.q_proj.weight", t["q"]), ("l.attn.k_proj.weight", t["k"])]
    arriving += [(f"l.mlp.experts.{e}.{kind}_proj.weight", t[f"{kind}{e}"]) for e in (1, 0) for kind in ("up", "down", "gate")]
    checksums = Checksums(experts=2)
    assert [name for name, _ in checksums.observe(arriving)] == [name for name, _ in arriving]
    engine = {
        "l.attn.qkv_proj.weight": tensor_hash([torch.cat([t["q"], t["k"], t["v"]])]),
        "l.mlp.experts.w13_weight": tensor_hash([torch.cat([t["gate0"], t["up0"], t["gate1"], t["up1"]])]),
        "l.mlp.experts.w2_weight": tensor_hash([torch.cat([t["down0"], t["down1"]])]),
    }
    assert checksums.difference(engine) is None
    assert checksums.difference(engine | {"l.attn.qkv_proj.weight": "0" * 16}) == (
        "1 of 3 tensors differ, among them ['l.attn.qkv_proj.weight']"
    )
    assert checksums.difference(engine | {"other": "0" * 16}) == "tensors that only one side has: ['other']"
