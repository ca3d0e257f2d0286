"""The grouped expert products equal the sum over experts written out, and leave to SGLang what they do not compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron_rl_patches.sglang.grouped_experts import forward, grouped_experts
from torch.nn import functional

HIDDEN, WIDTH, EXPERTS, TOPK = 16, 8, 5, 2
TOLERANCE = 5e-6
CONFIG = {"activation": "silu", "gemm1_alpha": None, "apply_router_weight_on_input": False}


def _layer(seed: int = 0, width: int = WIDTH) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * width, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, width, generator=generator) / width**0.5
    return SimpleNamespace(w13_weight=w13, w2_weight=w2)


def _tokens(count: int, experts: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, router weights and ids; only the first ``experts`` experts are ever chosen."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, experts, generator=generator).topk(TOPK).indices.int()
    return torch.randn(count, HIDDEN, generator=generator), torch.rand(count, TOPK, generator=generator), ids


def _written_out(layer: SimpleNamespace, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (layer.w13_weight[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight.double() * (layer.w2_weight[expert].double() @ (functional.silu(gate) * up))
    return out


@pytest.mark.parametrize(("count", "experts"), [(1, EXPERTS), (7, 3), (40, EXPERTS)], ids=["one-token", "idle-experts", "many"])
def test_it_equals_the_sum_over_experts(count: int, experts: int) -> None:
    layer, (x, weights, ids) = _layer(), _tokens(count, experts)
    out = grouped_experts(x, weights, ids, layer.w13_weight, layer.w2_weight)
    # Values are of order 1, sums of 16 and 8 terms: fp32 keeps them to a few 1e-6.
    torch.testing.assert_close(out.double(), _written_out(layer, x, weights, ids), rtol=0, atol=TOLERANCE)


def test_it_keeps_bf16() -> None:
    layer, (x, weights, ids) = _layer(), _tokens(9, EXPERTS)
    out = grouped_experts(x.bfloat16(), weights, ids, layer.w13_weight.bfloat16(), layer.w2_weight.bfloat16())
    assert out.dtype == torch.bfloat16
    # bf16 has 8 bits: values of order 1 are off by some thousandths at each of four roundings.
    torch.testing.assert_close(out.double(), _written_out(layer, x, weights, ids), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({}, {**CONFIG, "activation": "gelu"}),
        ({}, {**CONFIG, "gemm1_alpha": 1.7}),
        ({}, {**CONFIG, "apply_router_weight_on_input": True}),
        ({"w13_weight_bias": torch.zeros(EXPERTS, 2 * WIDTH)}, CONFIG),
        ({"w2_weight_bias": torch.zeros(EXPERTS, HIDDEN)}, CONFIG),
        (vars(_layer(width=6)), CONFIG),  # rows of 24 bytes, which grouped_mm refuses
    ],
    ids=["gelu", "clamped", "weight-on-input", "bias-in", "bias-out", "unaligned"],
)
def test_the_rest_is_left_to_sglang(change: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    layer = SimpleNamespace(**{**vars(_layer()), **change})
    x, weights, ids = _tokens(4, EXPERTS)
    marker = torch.zeros(1)
    assert forward(lambda *arguments: marker, layer, x, (weights, ids, None), SimpleNamespace(**config)) is marker


def test_the_plain_case_is_not_left_to_sglang() -> None:
    x, weights, ids = _tokens(4, EXPERTS)
    layer = _layer()
    out = forward(lambda *arguments: pytest.fail("the loop ran"), layer, x, (weights, ids, None), SimpleNamespace(**CONFIG))
    torch.testing.assert_close(out.double(), _written_out(layer, x, weights, ids), rtol=0, atol=TOLERANCE)
