"""What config.json becomes, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_rl.convert.families import family_for
from megatron_rl.convert.family import padded_vocab_size

# Qwen/Qwen3-30B-A3B's config.json, as transformers 4 wrote it.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_qwen3_30b_a3b() -> None:
    family = family_for(QWEN3_30B_A3B)
    config = family.transformer_config(QWEN3_30B_A3B)
    assert config["kv_channels"] == 128 and config["num_query_groups"] == 4 and config["moe_ffn_hidden_size"] == 768
    assert config["moe_layer_freq"] == [1] * 48
    assert config["moe_router_pre_softmax"] is False
    # 151936 = 1187 x 128 divides by 128 but not by 128 x 8; the next multiple of 1024 is 149 x 1024 = 152576.
    assert family.gpt_model(QWEN3_30B_A3B, tensor_parallel=8)["vocab_size"] == 152576
    assert family.gpt_model(QWEN3_30B_A3B)["vocab_size"] == 151936
    assert family.gpt_model(QWEN3_30B_A3B)["rotary_base"] == 1e6
    # embedding, norm, head; each layer: 5 of attention, norm, router, 128 experts of 2.
    assert sum(1 for _ in family.slots(family.shape(QWEN3_30B_A3B))) == 3 + 48 * (5 + 2 + 128 * 2)


def test_transformers_5_names_mean_the_same() -> None:
    new = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_theta", "rope_scaling", "num_experts", "torch_dtype")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 128, "dtype": "bfloat16"}
    family = family_for(new)
    assert family.transformer_config(new) == family.transformer_config(QWEN3_30B_A3B)
    assert family.gpt_model(new) == family.gpt_model(QWEN3_30B_A3B)


def test_dense_layers_among_routed_ones() -> None:
    # transformers routes layer i when i + 1 is a multiple of the step, and i is not excluded: 1, 3, 5 without 3.
    hf = QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert family_for(hf).transformer_config(hf)["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]


def test_unnormalised_gates_are_a_softmax_before_the_choice() -> None:
    hf = QWEN3_30B_A3B | {"norm_topk_prob": False}
    assert family_for(hf).transformer_config(hf)["moe_router_pre_softmax"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures = ['MixtralForCausalLM'] is not supported; supported are Qwen3Moe"),
        ({"architectures": None}, "architectures = [] is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported for Qwen3-MoE; only False or None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for Qwen3-MoE; only 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn' is not supported for Qwen3-MoE"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling of type 'linear' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = {'quant_method': 'fp8'} is not supported"),
        ({"logit_softcap": 30.0}, "logit_softcap = 30.0 is unknown for Qwen3-MoE and may change what it computes"),
        ({"num_experts": None}, "num_experts is missing; Qwen3-MoE needs it"),
    ],
)
def test_what_would_compute_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    hf = QWEN3_30B_A3B | change
    with pytest.raises(ValueError, match=re.escape(message)):
        family_for(hf).transformer_config(hf)


def test_one_normalised_expert_is_refused() -> None:
    hf = QWEN3_30B_A3B | {"num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="norm_topk_prob = True with num_experts_per_tok = 1"):
        family_for(hf).transformer_config(hf)


def test_padding_rounds_up_and_only_then() -> None:
    assert [padded_vocab_size(n, 128) for n in (509, 512, 513)] == [512, 512, 640]
