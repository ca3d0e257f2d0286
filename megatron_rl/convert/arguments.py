"""From the fields of config.json to Megatron's arguments, one function a trait: routers, shared experts, latent attention.

Each takes the checked fields under their canonical names and the model's sizes, and returns arguments of TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layouts import ModelShape
from .rope import read_rope

Fields = Mapping[str, Any]


def every_layer(config: Fields, layer: int) -> bool:
    """Whether a layer has experts: each does."""
    return True


def qwen_layers(config: Fields, layer: int) -> bool:
    """Whether a layer has experts, by the rule of transformers' Qwen2MoeDecoderLayer."""
    return layer not in (config["mlp_only_layers"] or ()) and (layer + 1) % config["decoder_sparse_step"] == 0


def deepseek_layers(config: Fields, layer: int) -> bool:
    """Whether a layer has experts, by the rule of DeepSeek's own modelling code."""
    return layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0


def softmax_router(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """Gates are softmax scores, taken as they are or normalised over the chosen."""
    normalised = config["norm_topk_prob"]
    _refuse_single_normalised(config)
    return {
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # A softmax over the chosen logits is the softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not normalised,
    }


def greedy_groups_router(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """DeepSeek-V2: softmax scores times a constant; the best expert of a group speaks for it."""
    scaling = {"moe_router_topk_scaling_factor": config["routed_scaling_factor"]}
    groups = {} if config["topk_method"] == "greedy" else _groups(config, summed=1)
    return {**softmax_router(config, shape), **scaling, **groups}


def sigmoid_router(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """DeepSeek-V3: a bias takes part in the choice and not in the gates; the two best experts of a group speak for it.

    The bias stays as it was loaded: Megatron would move it towards equal loads after every optimizer step.
    """
    _refuse_single_normalised(config)
    return {
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        **_groups(config, summed=2),
    }


def _refuse_single_normalised(config: Fields) -> None:
    if config["norm_topk_prob"] and config["num_experts_per_tok"] == 1:
        raise ValueError(
            "config.json: norm_topk_prob = True with num_experts_per_tok = 1 makes every gate 1; Megatron's router cannot express that"
        )


def _groups(config: Fields, *, summed: int) -> dict[str, Any]:
    """Megatron scores a group by its topk // topk_group best experts; the model by its `summed` best."""
    groups, kept, top_k = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    if not groups or not kept or groups == kept:
        return {}
    if top_k // kept != summed:
        raise ValueError(
            f"config.json: num_experts_per_tok = {top_k} with topk_group = {kept} is not supported: the model scores a group by its "
            f"{summed} best experts, Megatron by its {top_k // kept} best (num_experts_per_tok // topk_group)"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


def shared_expert(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """Experts that every token goes to, as one."""
    return {"moe_shared_expert_intermediate_size": shape.shared_ffn} if shape.shared_ffn else {}


def gated_shared_expert(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """Qwen2-MoE: the shared expert's output times a sigmoid of its own."""
    return {"moe_shared_expert_intermediate_size": shape.shared_ffn, "moe_shared_expert_gate": True}


def latent_attention(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """DeepSeek's attention on compressed keys and values."""
    if shape.groups != shape.heads:
        raise ValueError(
            f"config.json: num_key_value_heads = {shape.groups} is not supported; latent attention has as many as its {shape.heads} heads"
        )
    rope = read_rope(config, "latent attention", ("default", "yarn"))
    if rope.parameters.get("truncate", True) is not True:
        raise ValueError("config.json: rope parameter truncate = False is not supported; Megatron's latent attention rounds its range")
    return {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "q_lora_rank": shape.query_rank or None,
        "kv_lora_rank": shape.key_rank,
        "qk_head_dim": shape.head_dim - shape.rotary,
        "qk_pos_emb_head_dim": shape.rotary,
        "v_head_dim": shape.value_dim,
        **rope.latent_attention(),
    }


def sinks_and_windows(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """GPT-OSS's attention: a learnt logit a head that takes part in the softmax, and layers that look back only so far."""
    kinds = config["layer_types"] or ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)]
    return {
        "softmax_type": "learnable",
        "window_size": (config["sliding_window"] - 1, 0),  # keys before the query's own
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def clamped_experts(config: Fields, shape: ModelShape) -> dict[str, Any]:
    """GPT-OSS's experts: (up + 1) x gate x sigmoid(1.702 gate), both clamped."""
    from megatron.core.activations import quick_gelu

    return {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": config["swiglu_limit"]}
