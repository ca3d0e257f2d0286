"""The model families that can be converted, as tables: config fields, tensor names, shapes and layouts.

Names hold {layer} and {expert}, both counted from 0 over the whole model; `bridge` turns the local numbers of a live Megatron
model into these. A new family is a new entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from .family import Family, FusedExperts, HfTensor, TensorMapping
from .layouts import GATE_UP, QKV, REPLICATED, ROW, VOCAB

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.local_experts.{expert}."
_HF_EXPERT = _HF_LAYER + "mlp.experts.{expert}."


def _norm(mcore: tuple[str, ...], hf: str, part: Any, size: str = "hidden") -> TensorMapping:
    return TensorMapping(tuple(_LAYER + name for name in mcore), (HfTensor(_HF_LAYER + hf, (size,)),), REPLICATED, part)


_ENDS = (
    TensorMapping(("embedding.word_embeddings.weight",), (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),), VOCAB, "embedding"),
    TensorMapping(("decoder.final_layernorm.weight",), (HfTensor("model.norm.weight", ("hidden",)),), REPLICATED, "final"),
    TensorMapping(("output_layer.weight",), (HfTensor("lm_head.weight", ("vocab", "hidden")),), VOCAB, "head"),
)

_ATTENTION = (
    _norm(("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), "input_layernorm.weight", "layer"),
    TensorMapping(
        (_LAYER + "self_attention.linear_qkv.weight",),
        (
            HfTensor(_HF_LAYER + "self_attn.q_proj.weight", ("query", "hidden")),
            HfTensor(_HF_LAYER + "self_attn.k_proj.weight", ("key", "hidden")),
            HfTensor(_HF_LAYER + "self_attn.v_proj.weight", ("key", "hidden")),
        ),
        QKV,
        "layer",
    ),
    _norm(("self_attention.q_layernorm.weight",), "self_attn.q_norm.weight", "layer", "head_dim"),
    _norm(("self_attention.k_layernorm.weight",), "self_attn.k_norm.weight", "layer", "head_dim"),
    TensorMapping(
        (_LAYER + "self_attention.linear_proj.weight",),
        (HfTensor(_HF_LAYER + "self_attn.o_proj.weight", ("hidden", "query")),),
        ROW,
        "layer",
    ),
)

_DENSE_MLP = (
    _norm(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), "post_attention_layernorm.weight", "dense-layer"),
    TensorMapping(
        (_LAYER + "mlp.linear_fc1.weight",),
        (
            HfTensor(_HF_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
            HfTensor(_HF_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        GATE_UP,
        "dense-layer",
    ),
    TensorMapping(
        (_LAYER + "mlp.linear_fc2.weight",), (HfTensor(_HF_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),), ROW, "dense-layer"
    ),
)

_MOE_MLP = (
    _norm(("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", "moe-layer"),
    TensorMapping(
        (_LAYER + "mlp.router.weight",), (HfTensor(_HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),), REPLICATED, "moe-layer"
    ),
    TensorMapping(
        (_EXPERT + "linear_fc1.weight", _LAYER + "mlp.experts.linear_fc1.weight{expert}"),
        (
            HfTensor(_HF_EXPERT + "gate_proj.weight", ("moe_ffn", "hidden")),
            HfTensor(_HF_EXPERT + "up_proj.weight", ("moe_ffn", "hidden")),
        ),
        GATE_UP,
        "expert",
    ),
    TensorMapping(
        (_EXPERT + "linear_fc2.weight", _LAYER + "mlp.experts.linear_fc2.weight{expert}"),
        (HfTensor(_HF_EXPERT + "down_proj.weight", ("hidden", "moe_ffn")),),
        ROW,
        "expert",
    ),
)

_FUSED_GATE_UP_DOWN = (
    FusedExperts(_HF_LAYER + "mlp.experts.gate_up_proj", (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight")),
    FusedExperts(_HF_LAYER + "mlp.experts.down_proj", (_HF_EXPERT + "down_proj.weight",)),
)

_REQUIRED = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    }
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
_QWEN3: dict[str, Any] = {
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "add_qkv_bias": False,
}

FAMILIES: tuple[Family, ...] = (
    Family(
        name="Qwen3-MoE",
        architectures=("Qwen3MoeForCausalLM",),
        moe=True,
        required=_REQUIRED | {"num_experts", "num_experts_per_tok", "moe_intermediate_size"},
        optional={
            "head_dim": None,
            "tie_word_embeddings": False,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "sliding_window": None,
        },
        fixed=_FIXED,
        aliases={"num_local_experts": "num_experts"},
        tensors=_ENDS + _ATTENTION + _DENSE_MLP + _MOE_MLP,
        fused_experts=_FUSED_GATE_UP_DOWN,
        transformer=_QWEN3,
    ),
    Family(
        name="Qwen3",
        architectures=("Qwen3ForCausalLM",),
        moe=False,
        required=_REQUIRED | {"head_dim"},
        optional={"tie_word_embeddings": False, "sliding_window": None},
        fixed=_FIXED,
        aliases={},
        tensors=_ENDS + _ATTENTION + _DENSE_MLP,
        transformer=_QWEN3,
    ),
)


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
