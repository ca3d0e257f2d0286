"""The model families that can be converted. A new family is a new entry of `FAMILIES`, made of rows (`rows`) and traits (`arguments`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from .arguments import (
    clamped_experts,
    deepseek_layers,
    every_layer,
    gated_shared_expert,
    greedy_groups_router,
    latent_attention,
    qwen_layers,
    shared_expert,
    sigmoid_router,
    sinks_and_windows,
    softmax_router,
)
from .family import Family
from .rows import (
    ATTENTION,
    DENSE_MLP,
    ENDS,
    EXPERT_BIAS,
    FUSED_GATE_UP_DOWN,
    GPT_OSS,
    GPT_OSS_FUSED,
    HEAD_NORMS,
    LATENT_ATTENTION,
    PROJECTION_NORMS,
    SHARED_GATE,
    moe_mlp,
    shared_mlp,
)

_REQUIRED = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    }
)
_GROUPED = _REQUIRED | {"num_key_value_heads"}
_ROUTED = frozenset({"num_experts", "num_experts_per_tok"})
_OPTIONAL: dict[str, Any] = {"head_dim": None, "tie_word_embeddings": False}
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
}
_UNSLIDING: dict[str, tuple[Any, ...]] = {**_FIXED, "use_sliding_window": (False, None), "use_mrope": (False,)}
_TRANSFORMER: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
}
_QWEN_MOE: dict[str, Any] = {
    **_OPTIONAL,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "sliding_window": None,
}
_DEEPSEEK = frozenset({"kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"})
_DEEPSEEK_OPTIONAL: dict[str, Any] = {
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
    "q_lora_rank": None,
    "n_shared_experts": None,
    "n_group": None,
    "topk_group": None,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
}
_DEEPSEEK_FIXED: dict[str, tuple[Any, ...]] = {
    **_FIXED,
    "pretraining_tp": (1, None),
    "mlp_bias": (False,),
    "rope_interleave": (True,),
    "num_nextn_predict_layers": (0, None),
}
_DEEPSEEK_ALIASES = {"n_routed_experts": "num_experts", "num_local_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"}

QWEN3_MOE = Family(
    name="Qwen3-MoE",
    architectures=("Qwen3MoeForCausalLM",),
    required=_GROUPED | _ROUTED | {"moe_intermediate_size"},
    optional=_QWEN_MOE,
    fixed=_UNSLIDING,
    aliases={"num_local_experts": "num_experts"},
    tensors=ENDS + ATTENTION + HEAD_NORMS + DENSE_MLP + moe_mlp(),
    fused_experts=FUSED_GATE_UP_DOWN,
    transformer=_TRANSFORMER,
    arguments=(softmax_router,),
    routed=qwen_layers,
    head_norm="head",
)
QWEN3 = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    required=_GROUPED | {"head_dim"},
    optional={**_OPTIONAL, "sliding_window": None},
    fixed=_UNSLIDING,
    tensors=ENDS + ATTENTION + HEAD_NORMS + DENSE_MLP,
    transformer=_TRANSFORMER,
    head_norm="head",
)
QWEN2_MOE = Family(
    name="Qwen2-MoE",
    architectures=("Qwen2MoeForCausalLM",),
    required=_GROUPED | _ROUTED | {"moe_intermediate_size", "shared_expert_intermediate_size"},
    optional={**_QWEN_MOE, "qkv_bias": True},
    fixed=_UNSLIDING,
    aliases={"num_local_experts": "num_experts"},
    tensors=ENDS + ATTENTION + DENSE_MLP + moe_mlp() + shared_mlp("shared_expert") + SHARED_GATE,
    fused_experts=FUSED_GATE_UP_DOWN,
    transformer=_TRANSFORMER,
    arguments=(softmax_router, gated_shared_expert),
    routed=qwen_layers,
)
QWEN2 = Family(
    name="Qwen2",
    architectures=("Qwen2ForCausalLM",),
    required=_GROUPED,
    optional={**_OPTIONAL, "sliding_window": None, "qkv_bias": True},
    fixed={**_UNSLIDING, "qkv_bias": (True,)},
    tensors=ENDS + ATTENTION + DENSE_MLP,
    transformer=_TRANSFORMER,
)
LLAMA = Family(
    name="Llama",
    architectures=("LlamaForCausalLM",),
    required=_REQUIRED,
    optional={**_OPTIONAL, "num_key_value_heads": None},
    fixed={**_FIXED, "mlp_bias": (False,), "pretraining_tp": (1, None)},
    tensors=ENDS + ATTENTION + DENSE_MLP,
    transformer=_TRANSFORMER,
    rope=("default", "linear", "llama3"),
)
MIXTRAL = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM",),
    required=_GROUPED | _ROUTED,
    optional={**_OPTIONAL, "norm_topk_prob": True},
    fixed={**_FIXED, "norm_topk_prob": (True,), "sliding_window": (None,), "router_jitter_noise": (0, 0.0)},
    aliases={"num_local_experts": "num_experts"},
    tensors=ENDS + ATTENTION + moe_mlp("block_sparse_moe", gate="w1", up="w3", down="w2"),
    transformer=_TRANSFORMER,
    arguments=(softmax_router,),
    routed=every_layer,
    expert_width="intermediate_size",
)
OLMOE = Family(
    name="OLMoE",
    architectures=("OlmoeForCausalLM",),
    required=_REQUIRED | _ROUTED,
    optional={**_OPTIONAL, "num_key_value_heads": None, "norm_topk_prob": False},
    fixed={**_FIXED, "clip_qkv": (None,)},
    aliases={"num_local_experts": "num_experts"},
    tensors=ENDS + ATTENTION + PROJECTION_NORMS + moe_mlp(),
    fused_experts=FUSED_GATE_UP_DOWN,
    transformer=_TRANSFORMER,
    arguments=(softmax_router,),
    routed=every_layer,
    expert_width="intermediate_size",
    head_norm="projection",
)
DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    architectures=("DeepseekV2ForCausalLM",),
    required=_REQUIRED | _ROUTED | _DEEPSEEK,
    optional={**_DEEPSEEK_OPTIONAL, "topk_method": "greedy", "norm_topk_prob": False},
    # Their own code and transformers' differ in what they make of normalised gates.
    fixed={
        **_DEEPSEEK_FIXED,
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    aliases=_DEEPSEEK_ALIASES,
    ignored=frozenset({"head_dim", "qk_head_dim"}),
    tensors=ENDS + LATENT_ATTENTION + DENSE_MLP + moe_mlp() + shared_mlp("shared_experts"),
    fused_experts=FUSED_GATE_UP_DOWN,
    transformer=_TRANSFORMER,
    arguments=(greedy_groups_router, shared_expert, latent_attention),
    routed=deepseek_layers,
    rope=("default", "yarn"),
    extra_layers=True,
)
DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    architectures=("DeepseekV3ForCausalLM",),
    required=_REQUIRED | _ROUTED | _DEEPSEEK,
    optional={**_DEEPSEEK_OPTIONAL, "norm_topk_prob": True},
    fixed={**_DEEPSEEK_FIXED, "norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    aliases=_DEEPSEEK_ALIASES,
    ignored=frozenset({"head_dim", "qk_head_dim"}),
    tensors=ENDS + LATENT_ATTENTION + DENSE_MLP + moe_mlp() + EXPERT_BIAS + shared_mlp("shared_experts"),
    fused_experts=FUSED_GATE_UP_DOWN,
    transformer=_TRANSFORMER,
    arguments=(sigmoid_router, shared_expert, latent_attention),
    routed=deepseek_layers,
    rope=("default", "yarn"),
    extra_layers=True,
)
"""Moonlight's too, which has the same architecture under the same name."""

GPT_OSS_FAMILY = Family(
    name="GPT-OSS",
    architectures=("GptOssForCausalLM",),
    required=_GROUPED | _ROUTED | {"sliding_window"},
    optional={**_OPTIONAL, "norm_topk_prob": True, "qkv_bias": True, "layer_types": None, "swiglu_limit": 7.0},
    fixed={
        **_FIXED,
        "attention_bias": (True,),
        "norm_topk_prob": (True,),
        "qkv_bias": (True,),
        "swiglu_alpha": (1.702,),
    },
    aliases={"num_local_experts": "num_experts"},
    ignored=frozenset({"initial_context_length", "experts_per_token"}),
    tensors=ENDS + ATTENTION + GPT_OSS,
    fused_experts=GPT_OSS_FUSED,
    transformer={**_TRANSFORMER, "add_bias_linear": True},
    arguments=(softmax_router, sinks_and_windows, clamped_experts),
    routed=every_layer,
    expert_width="intermediate_size",
    rope=("default", "yarn"),
    layer_types=("full_attention", "sliding_attention"),
)

FAMILIES: tuple[Family, ...] = (QWEN3_MOE, QWEN3, QWEN2_MOE, QWEN2, LLAMA, MIXTRAL, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS_FAMILY)


def family_for(hf: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its `architectures`.

    Raises:
        ValueError: no family has this architecture; the message lists those there are.
    """
    named = hf.get("architectures") or []
    for family in FAMILIES:
        if any(architecture in family.architectures for architecture in named):
            return family
    supported = ", ".join(a for family in FAMILIES for a in family.architectures)
    raise ValueError(f"config.json: architectures = {named!r} is not supported; supported are {supported}")
