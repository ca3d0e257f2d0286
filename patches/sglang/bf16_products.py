"""bf16 matrix products through fp32 on a CPU that has no bf16 instructions.

There a bf16 product takes torch's reference path, 10 to 25 times slower than converting both operands, multiplying in fp32 and
rounding the result once. That is what hardware with bf16 does too: exact products, fp32 sums, one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron_rl_patches.core import Anchor, Patch
from torch.nn import functional

from .version import SGLANG, TESTED


def slow_bf16() -> bool:
    """Whether this CPU lacks bf16 instructions."""
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def is_slow(x: torch.Tensor, weight: Any) -> bool:
    """Whether x @ weight would take the reference path."""
    return isinstance(weight, torch.Tensor) and x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu" and slow_bf16()


def linear(
    original: Callable[..., torch.Tensor], method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Hook around ``UnquantizedLinearMethod.apply``."""
    if not is_slow(x, layer.weight):
        return original(method, layer, x, bias)
    return functional.linear(x.float(), layer.weight.float(), None if bias is None else bias.float()).to(x.dtype)


def lm_head(
    original: Callable[..., torch.Tensor], processor: Any, hidden_states: torch.Tensor, head: Any, *rest: Any, **named: Any
) -> torch.Tensor:
    """Hook around ``LogitsProcessor._compute_lm_head``: a plain projection only, everything else stays with SGLang."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    plain = isinstance(getattr(head, "quant_method", None), UnquantizedEmbeddingMethod) and not hasattr(head, "set_lora")
    own_dtype = processor.use_fp32_lm_head or processor.rl_on_policy_target is not None
    bias = rest[0] if rest else named.get("embedding_bias")
    if not plain or own_dtype or bias is not None or not is_slow(hidden_states, head.weight):
        return original(processor, hidden_states, head, *rest, **named)
    return (hidden_states.float() @ head.weight.float().T).to(hidden_states.dtype)


def hook_products() -> None:
    """Register the hooks; ``load_plugins`` puts them in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", linear, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", lm_head, HookType.AROUND)


BF16_PRODUCTS = Patch(
    name="bf16-products",
    dependency=SGLANG,
    reason="Without bf16 instructions torch's bf16 products take a reference path, most of a bf16 server's decode step.",
    upstream="none",
    versions=TESTED,
    removal="torch converts the operands itself on such CPUs",
    anchors=(
        Anchor("srt/layers/quantization/unquant.py", r"^class UnquantizedLinearMethod\("),
        Anchor("srt/layers/quantization/unquant.py", r"^        return F\.linear\(x, layer\.weight, bias\)$"),
        Anchor("srt/layers/logits_processor.py", r"^    def _compute_lm_head\($"),
    ),
    apply=hook_products,
)
