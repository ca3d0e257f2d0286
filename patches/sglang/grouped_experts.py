"""The experts of a layer in two grouped matrix products, where SGLang's CPU path loops over them in Python.

Shape suffixes: T tokens, K experts a token, E experts, H hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron_rl_patches.core import Anchor, Patch
from torch.nn import functional

from .bf16_products import is_slow
from .version import SGLANG, TESTED

GROUPED_MM_ALIGNMENT = 16
"""Bytes to which grouped_mm wants every row of its operands aligned."""


def grouped_experts(
    x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor, w13_E2FH: torch.Tensor, w2_EHF: torch.Tensor
) -> torch.Tensor:
    """Sum over each token's experts of weight * w2 (silu(w1 x) * w3 x).

    Args:
        x_TH: hidden states, in the dtype of the experts.
        weights_TK, ids_TK: of the router, fp32 and int.
        w13_E2FH: w1 above w3.
        w2_EHF: the way back.

    Returns:
        [T, H], in the dtype of ``x_TH``; equal to SGLang's loop bit for bit in fp32, up to the sum over K.
    """
    ids = ids_TK.flatten().long()
    order = ids.argsort()
    ends_E = torch.bincount(ids, minlength=w13_E2FH.shape[0]).cumsum(0, dtype=torch.int32)
    rows = x_TH.index_select(0, order // ids_TK.shape[1])
    gate, up = _grouped(rows, w13_E2FH, ends_E).chunk(2, dim=-1)
    rows = _grouped(functional.silu(gate).mul_(up), w2_EHF, ends_E)
    out_TKH = torch.empty_like(rows).index_copy_(0, order, rows).view(*ids_TK.shape, -1)
    return torch.bmm(weights_TK.unsqueeze(1), out_TKH.to(weights_TK.dtype)).squeeze(1).to(x_TH.dtype)


def _grouped(rows: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its weight, transposed; through fp32 where bf16 products are slow."""
    if is_slow(rows, weight_EOI):
        return functional.grouped_mm(rows.float(), weight_EOI.float().transpose(1, 2), offs=ends_E).to(rows.dtype)
    return functional.grouped_mm(rows, weight_EOI.transpose(1, 2), offs=ends_E)


def is_plain(layer: Any, x_TH: torch.Tensor, config: Any) -> bool:
    """Whether ``grouped_experts`` computes what SGLang's loop would: SwiGLU without clamps, biases or weights on the input."""
    aligned = all(size * x_TH.element_size() % GROUPED_MM_ALIGNMENT == 0 for size in layer.w2_weight.shape[1:])
    biased = getattr(layer, "w13_weight_bias", None) is not None or getattr(layer, "w2_weight_bias", None) is not None
    swiglu = config.activation == "silu" and config.gemm1_alpha is None and not config.apply_router_weight_on_input
    return aligned and swiglu and not biased and x_TH.shape[0] > 0 and x_TH.dtype == layer.w13_weight.dtype == layer.w2_weight.dtype


def forward(original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
    """Hook around SGLang's ``moe_forward_native``, which still serves what is not plain."""
    if not is_plain(layer, x, moe_runner_config):
        return original(layer, x, topk_output, moe_runner_config)
    weights_TK, ids_TK, _ = topk_output
    return grouped_experts(x, weights_TK, ids_TK, layer.w13_weight, layer.w2_weight)


def hook_experts() -> None:
    """Register the hook; ``load_plugins`` puts it in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", forward, HookType.AROUND)


GROUPED_EXPERTS = Patch(
    name="grouped-experts",
    dependency=SGLANG,
    reason="Without AMX the experts run in a Python loop, a fifth of a decode step once attention is batched.",
    upstream="none",
    versions=TESTED,
    removal="moe_forward_native uses grouped_mm, or sgl_kernel's fused experts run without AMX",
    anchors=(
        Anchor("srt/layers/moe/fused_moe_native.py", r"^def moe_forward_native\($"),
        Anchor("srt/layers/moe/fused_moe_native.py", r"^    for i, num_tokens in enumerate\(tokens_per_expert\):$"),
        Anchor(
            "srt/layers/quantization/unquant.py", r"^            from sglang\.srt\.layers\.moe\.fused_moe_native import moe_forward_native$"
        ),
    ),
    apply=hook_experts,
)
