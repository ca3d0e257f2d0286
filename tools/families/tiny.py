"""Tiny random checkpoints of every family, made by transformers itself: the models that conversions are checked on.

No two dimensions are equal where the family leaves a choice, nothing divides the vocabulary, every tensor has its own random values
(norms and biases too), and the families with dense layers have some, so that a swapped, transposed or forgotten tensor shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file

LENGTHS = (24, 16)
"""Of the two sequences whose logits are compared; multiples of 4, which context parallelism cuts each into."""

_SIZES: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}
_NARROW = {"intermediate_size": 24}
"""Families whose experts have the width of the dense layer."""
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 4.0,  # with the usual 32 and 1, a head this small would be turned alike
    "beta_slow": 0.2,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _causal(family: str, **fields: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(hf, f"{family}Config")(**{**_SIZES, **fields})
        return getattr(hf, f"{family}ForCausalLM")(config)

    return build


TINY: dict[str, Callable[[], Any]] = {
    "qwen3-moe": _causal("Qwen3Moe", head_dim=20, **_QWEN_EXPERTS),
    "qwen3-moe-raw": _causal("Qwen3Moe", head_dim=20, **{**_QWEN_EXPERTS, "norm_topk_prob": False}),
    "qwen3": _causal("Qwen3", head_dim=20, tie_word_embeddings=True),
    "qwen2-moe": _causal("Qwen2Moe", **{**_QWEN_EXPERTS, "norm_topk_prob": False}, shared_expert_intermediate_size=56),
    "qwen2": _causal("Qwen2", tie_word_embeddings=True),
    "llama": _causal("Llama"),
    "llama3": _causal("Llama", head_dim=20, rope_parameters=_LLAMA3),
    "mixtral": _causal("Mixtral", num_local_experts=8, num_experts_per_tok=2, head_dim=20, **_NARROW),
    "olmoe": _causal("Olmoe", **_EXPERTS, **_NARROW),
    "deepseek-v2": _causal("DeepseekV2", **_LATENT, num_experts_per_tok=2, q_lora_rank=None, routed_scaling_factor=1.5),
    "deepseek-v2-groups": _causal(
        "DeepseekV2",
        **_LATENT,
        num_experts_per_tok=3,  # with as many as groups, the best experts would be in the best groups anyway
        q_lora_rank=28,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters=_YARN,
    ),
    "deepseek-v3": _causal(
        "DeepseekV3", **_LATENT, num_experts_per_tok=4, q_lora_rank=28, n_group=4, topk_group=2, num_mtp_layers=0, rope_parameters=_YARN
    ),
    "moonlight": _causal(
        "DeepseekV3",
        **{**_LATENT, "first_k_dense_replace": 2},
        num_experts_per_tok=3,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        rms_norm_eps=1e-4,
        routed_scaling_factor=2.446,
    ),
    "gpt-oss": _causal(
        "GptOss",
        head_dim=20,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=0.4,  # low enough to clamp something
        **_NARROW,
    ),
}
"""Builds the model of each family, and of variants that take another branch."""


def make_tiny(name: str, folder: Path) -> Path:
    """Writes a checkpoint to `folder`, and what transformers makes of random tokens to folder/reference and folder/gradients.

    The reference holds tokens [T] of all sequences one after the other and logits [T, V], each sequence scored by itself; and
    factors [T, H], whose products with the last hidden states sum to the loss of the gradients. These are a checkpoint too.
    """
    hf.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(7)
    model = TINY[name]().float().eval()
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor_name.endswith("inv_freq"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + 0.3 * noise if "norm" in tensor_name else 0.08 * noise
    model.save_pretrained(folder)
    sequences = [torch.randint(0, _SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    factors = [torch.randn(length, _SIZES["hidden_size"], generator=generator) for length in LENGTHS]
    logits = []
    for tokens, factors_TH in zip(sequences, factors, strict=True):
        hidden = model.model(input_ids=tokens[None]).last_hidden_state
        logits.append(model.lm_head(hidden).detach()[0])
        (hidden[0] * factors_TH).sum().backward()
    (folder / "reference").mkdir()
    reference = {"tokens": torch.cat(sequences), "logits": torch.cat(logits), "factors": torch.cat(factors)}
    save_file(reference, folder / "reference" / "logits.safetensors")
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")
    return folder
