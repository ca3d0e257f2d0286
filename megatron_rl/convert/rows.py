"""The rows of the families' tables: which Megatron tensor is which Hugging Face tensor, in which shape and layout.

Names hold {layer} and {expert}, both counted from 0 over the whole model; `live` turns the local numbers of a live Megatron
model into these. Where a row has several Megatron names, they are those of the local and of Transformer Engine's implementation, of
experts one by one and grouped.
"""

from __future__ import annotations

from typing import Any

import torch

from .family import FusedExperts, HfTensor, TensorMapping
from .layouts import ALTERNATING_GATE_UP, COLUMN, GATE_UP, QKV, REPLICATED, ROW, TRANSPOSED_ROW, VOCAB, Layout

Rows = tuple[TensorMapping, ...]

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def in_layer(
    mcore: str | tuple[str, ...], hf: dict[str, tuple[str, ...]], layout: Layout, part: Any = "layer", **options: Any
) -> TensorMapping:
    """A row whose names on both sides are within a layer."""
    names = (mcore,) if isinstance(mcore, str) else mcore
    tensors = tuple(HfTensor(HF_LAYER + name, shape) for name, shape in hf.items())
    return TensorMapping(tuple(LAYER + name for name in names), tensors, layout, part, **options)


ENDS: Rows = (
    TensorMapping(("embedding.word_embeddings.weight",), (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),), VOCAB, "embedding"),
    TensorMapping(("decoder.final_layernorm.weight",), (HfTensor("model.norm.weight", ("hidden",)),), REPLICATED, "final"),
    TensorMapping(("output_layer.weight",), (HfTensor("lm_head.weight", ("vocab", "hidden")),), VOCAB, "head"),
)

ATTENTION: Rows = (
    in_layer(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), {"input_layernorm.weight": ("hidden",)}, REPLICATED
    ),
    in_layer(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("query", "hidden"),
            "self_attn.k_proj.weight": ("key", "hidden"),
            "self_attn.v_proj.weight": ("key", "hidden"),
        },
        QKV,
    ),
    in_layer(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": ("query",), "self_attn.k_proj.bias": ("key",), "self_attn.v_proj.bias": ("key",)},
        QKV,
        only="qkv_bias",
    ),
    in_layer("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "query")}, ROW),
)

HEAD_NORMS: Rows = (
    in_layer("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}, REPLICATED),
    in_layer("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}, REPLICATED),
)

PROJECTION_NORMS: Rows = (
    in_layer("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("query",)}, COLUMN),
    in_layer("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("key",)}, COLUMN),
)

LATENT_ATTENTION: Rows = (
    in_layer("input_layernorm.weight", {"input_layernorm.weight": ("hidden",)}, REPLICATED),
    in_layer("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": ("query", "hidden")}, COLUMN, only="direct_query"),
    in_layer(
        "self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": ("query_rank", "hidden")}, REPLICATED, only="query_rank"
    ),
    in_layer("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": ("query_rank",)}, REPLICATED, only="query_rank"),
    in_layer("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": ("query", "query_rank")}, COLUMN, only="query_rank"),
    in_layer("self_attention.linear_kv_down_proj.weight", {"self_attn.kv_a_proj_with_mqa.weight": ("latent_down", "hidden")}, REPLICATED),
    in_layer("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": ("key_rank",)}, REPLICATED),
    in_layer("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": ("latent_up", "key_rank")}, COLUMN),
    in_layer("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "value")}, ROW),
)

DENSE_MLP: Rows = (
    in_layer(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        {"post_attention_layernorm.weight": ("hidden",)},
        REPLICATED,
        "dense-layer",
    ),
    in_layer(
        "mlp.linear_fc1.weight",
        {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
        GATE_UP,
        "dense-layer",
    ),
    in_layer("mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", "ffn")}, ROW, "dense-layer"),
)


def moe_mlp(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Rows:
    """The norm, the router and the experts of a routed layer, under the family's names for block and projections."""
    expert = f"{block}.experts.{{expert}}."
    return (
        in_layer("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}, REPLICATED, "moe-layer"),
        in_layer("mlp.router.weight", {f"{block}.gate.weight": ("experts", "hidden")}, REPLICATED, "moe-layer"),
        in_layer(
            ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
            {f"{expert}{gate}.weight": ("moe_ffn", "hidden"), f"{expert}{up}.weight": ("moe_ffn", "hidden")},
            GATE_UP,
            "expert",
        ),
        in_layer(
            ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
            {f"{expert}{down}.weight": ("hidden", "moe_ffn")},
            ROW,
            "expert",
        ),
    )


def shared_mlp(name: str) -> Rows:
    """The shared experts of a routed layer, as one feed-forward layer called `name`."""
    return (
        in_layer(
            "mlp.shared_experts.linear_fc1.weight",
            {f"mlp.{name}.gate_proj.weight": ("shared_ffn", "hidden"), f"mlp.{name}.up_proj.weight": ("shared_ffn", "hidden")},
            GATE_UP,
            "moe-layer",
            only="shared_ffn",
        ),
        in_layer(
            "mlp.shared_experts.linear_fc2.weight",
            {f"mlp.{name}.down_proj.weight": ("hidden", "shared_ffn")},
            ROW,
            "moe-layer",
            only="shared_ffn",
        ),
    )


SHARED_GATE: Rows = (
    in_layer("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": ("one", "hidden")}, REPLICATED, "moe-layer"),
)

EXPERT_BIAS: Rows = (
    in_layer(
        "mlp.router.expert_bias",
        {"mlp.gate.e_score_correction_bias": ("experts",)},
        REPLICATED,
        "moe-layer",
        dtype=torch.float32,
    ),
)
"""A buffer in Megatron; in fp32 since a rounded bias chooses other experts."""

FUSED_GATE_UP_DOWN = (
    FusedExperts(
        HF_LAYER + "mlp.experts.gate_up_proj",
        (HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", HF_LAYER + "mlp.experts.{expert}.up_proj.weight"),
    ),
    FusedExperts(HF_LAYER + "mlp.experts.down_proj", (HF_LAYER + "mlp.experts.{expert}.down_proj.weight",)),
)


def _alternating_expert(name: str, kind: str, hf: str, shape: tuple[str, ...], layout: Layout) -> TensorMapping:
    names = (f"mlp.experts.local_experts.{{expert}}.{name}.{kind}", f"mlp.experts.{name}.{kind}{{expert}}")
    return in_layer(names, {f"mlp.experts.{{expert}}.{hf}": shape}, layout, "expert")


GPT_OSS: Rows = (
    in_layer("self_attention.core_attention.softmax_offset", {"self_attn.sinks": ("heads",)}, COLUMN),
    in_layer("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": ("hidden",)}, REPLICATED),
    in_layer("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}, REPLICATED, "moe-layer"),
    in_layer("mlp.router.weight", {"mlp.router.weight": ("experts", "hidden")}, REPLICATED, "moe-layer"),
    in_layer("mlp.router.bias", {"mlp.router.bias": ("experts",)}, REPLICATED, "moe-layer"),
    _alternating_expert("linear_fc1", "weight", "gate_up_proj", ("hidden", "gate_and_up"), ALTERNATING_GATE_UP),
    _alternating_expert("linear_fc1", "bias", "gate_up_proj_bias", ("gate_and_up",), ALTERNATING_GATE_UP),
    _alternating_expert("linear_fc2", "weight", "down_proj", ("moe_ffn", "hidden"), TRANSPOSED_ROW),
    _alternating_expert("linear_fc2", "bias", "down_proj_bias", ("hidden",), REPLICATED),
)
"""Sinks, biases everywhere, and experts that are stored together, whatever the names here say (`GPT_OSS_FUSED`)."""

GPT_OSS_FUSED = tuple(
    FusedExperts(HF_LAYER + "mlp.experts." + name, (HF_LAYER + "mlp.experts.{expert}." + name,), written=True)
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
)
