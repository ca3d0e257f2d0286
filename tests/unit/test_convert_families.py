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


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


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
        ({"architectures": ["GemmaForCausalLM"]}, "architectures = ['GemmaForCausalLM'] is not supported; supported are Qwen3Moe"),
        ({"architectures": None}, "architectures = [] is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported for Qwen3-MoE; only False or None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for Qwen3-MoE; only 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn' is not supported for Qwen3-MoE"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling of type 'linear' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"rope_theta": None}, "rope_theta is missing"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quant_method 'fp8' without weight_block_size is not supported; only block-scaled",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method 'awq' is not supported; only block-scaled fp8 is read"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not supported"),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt = 'e5m2' is not supported; only 'e4m3'"),
        ({"quantization_config": {**FP8, "zero_point": 1}}, "['zero_point'] are unknown and may change what the weights are"),
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


# deepseek-ai/DeepSeek-V3's config.json, as its own code wrote it, without its multi-token prediction.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_deepseek_v3() -> None:
    family = family_for(DEEPSEEK_V3)
    config = family.transformer_config(DEEPSEEK_V3)
    assert config["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert (config["q_lora_rank"], config["kv_lora_rank"], config["qk_head_dim"], config["qk_pos_emb_head_dim"]) == (1536, 512, 128, 64)
    assert (config["moe_router_num_groups"], config["moe_router_group_topk"], config["moe_router_topk"]) == (8, 4, 8)
    assert config["moe_router_score_function"] == "sigmoid" and config["moe_router_enable_expert_bias"]
    assert config["moe_router_bias_update_rate"] == 0
    assert config["moe_shared_expert_intermediate_size"] == 2048
    assert config["rope_type"] == "yarn" and config["rotary_scaling_factor"] == 40
    # embedding, norm, head; each layer: 8 of attention with compressed queries; dense: norm and 2; routed: norm, router, bias, 2 shared.
    assert sum(1 for _ in family.slots(family.shape(DEEPSEEK_V3))) == 3 + 61 * 8 + 3 * 3 + 58 * (5 + 256 * 2)


def moonlight() -> dict[str, Any]:
    """Where moonshotai/Moonlight-16B-A3B differs: uncompressed queries, one group, plain positions."""
    changes = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "rms_norm_eps": 1e-5, "n_shared_experts": 2}
    return {**DEEPSEEK_V3, **changes, "rope_scaling": None, "quantization_config": None}


def test_moonlight() -> None:
    hf = moonlight()
    config = family_for(hf).transformer_config(hf)
    assert config["q_lora_rank"] is None and config["rope_type"] == "rope"
    assert "moe_router_num_groups" not in config  # all groups are kept
    assert config["moe_shared_expert_intermediate_size"] == 2 * 2048


DEEPSEEK_V2 = {
    **{k: v for k, v in DEEPSEEK_V3.items() if k != "quantization_config"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
}
LLAMA = {
    **{k: v for k, v in QWEN3_30B_A3B.items() if "expert" not in k and "moe" not in k and k not in ("norm_topk_prob", "mlp_only_layers")},
    "architectures": ["LlamaForCausalLM"],
    "mlp_bias": False,
}
for _name in ("decoder_sparse_step", "max_window_layers", "sliding_window", "use_sliding_window", "router_aux_loss_coef"):
    LLAMA.pop(_name)
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OLMOE = {**LLAMA, "architectures": ["OlmoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 8, "clip_qkv": None}
OLMOE.pop("mlp_bias")


# openai/gpt-oss-20b's config.json with its weights in bfloat16.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_gpt_oss() -> None:
    family = family_for(GPT_OSS)
    config = family.transformer_config(GPT_OSS)
    assert config["window_size"] == (127, 0)  # a query and the 127 positions before it
    assert config["window_attn_skip_freq"] == [1, 0] * 12
    assert config["moe_router_pre_softmax"] is False and config["add_bias_linear"]
    assert family.gpt_model(GPT_OSS)["position_embedding_type"] == "yarn"
    assert family.config_attributes(GPT_OSS)["yarn_correction_range_round_to_int"] is False
    # embedding, norm, head; each layer: norm, weights and biases of qkv and of the projection, sinks; norm, router and bias; 4 an expert.
    assert sum(1 for _ in family.slots(family.shape(GPT_OSS))) == 3 + 24 * (6 + 3 + 32 * 4)


def test_experts_with_biases_are_not_divided() -> None:
    from megatron_rl.actor.model import choose_implementation, transformer_config
    from megatron_rl.config import Config, ModelConfig, ParallelConfig

    how = choose_implementation(cuda=False, transformer_engine=False, apex=False)
    for parallel, divided in ((ParallelConfig(tensor=2), True), (ParallelConfig(tensor=2, expert=2), False)):
        config = Config(model=ModelConfig(path="gpt-oss"), parallel=parallel)
        if divided:  # without expert parallelism, tensor parallelism divides experts
            with pytest.raises(ValueError, match=re.escape("parallel.expert_tensor: 2 must be 1 for GPT-OSS, whose experts have biases")):
                transformer_config(config, family_for(GPT_OSS), GPT_OSS, how, cuda=False)
        else:
            core = transformer_config(config, family_for(GPT_OSS), GPT_OSS, how, cuda=False)
            assert core.expert_tensor_parallel_size == 1 and core.yarn_rotary_scaling_factor == 32


def test_llama_3_scaling_is_megatrons_where_its_constants_are() -> None:
    hf = LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}}
    assert family_for(hf).gpt_model(hf)["rope_scaling"] is True
    assert family_for(hf).gpt_model(hf)["rope_scaling_factor"] == 8
    assert "rope_scaling" not in family_for(LLAMA).gpt_model(LLAMA)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (LLAMA | {"attention_bias": True}, "attention_bias = True is not supported for Llama; only False or None (Megatron cannot"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias = True is not supported for Llama"),
        (LLAMA | {"pretraining_tp": 2}, "pretraining_tp = 2 is not supported for Llama"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic' is not supported for Llama"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 8.0}},
            "rope parameter high_freq_factor = 8.0 is not supported; Megatron has 4.0 built in",
        ),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope parameters ['factor'] are missing; linear scaling needs them"),
        (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' is not supported; only block-scaled fp8"),
        (GPT_OSS | {"swiglu_alpha": 2.0}, "swiglu_alpha = 2.0 is not supported for GPT-OSS; only 1.702"),
        (GPT_OSS | {"layer_types": ["chunked_attention"]}, "layer_types holds 'chunked_attention'; only 'full_attention' or 'sliding_att"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported for OLMoE"),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}, "only 0 or None; set it to 0 to leave the layers of multi-token prediction out"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported for DeepSeek-V3; only 'sigmoid'"),
        (DEEPSEEK_V3 | {"norm_topk_prob": False}, "norm_topk_prob = False is not supported for DeepSeek-V3"),
        (DEEPSEEK_V3 | {"num_experts_per_tok": 4}, "the model scores a group by its 2 best experts, Megatron by its 1 best"),
        (DEEPSEEK_V2, "the model scores a group by its 1 best experts, Megatron by its 2 best"),  # 8 experts of 4 groups
        (DEEPSEEK_V3 | {"num_key_value_heads": 64}, "num_key_value_heads = 64 is not supported; latent attention has as many as its 128"),
        (DEEPSEEK_V3 | {"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": None}}, "mscale_all_dim without mscale is not supported"),
        (DEEPSEEK_V3 | {"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "truncate": False}}, "truncate = False is not supported"),
    ],
)
def test_what_other_families_cannot_compute_is_refused(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        family_for(hf).transformer_config(hf)


@pytest.mark.parametrize(
    ("hf", "name", "expected"),
    [
        (GPT_OSS, "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.bias", "model.layers.5.mlp.experts.19.gate_up_proj_bias"),
        (GPT_OSS, "decoder.layers.1.mlp.experts.linear_fc1.bias3", "model.layers.5.mlp.experts.19.gate_up_proj_bias"),
        (DEEPSEEK_V3, "decoder.layers.0.mlp.experts.linear_fc2.weight0", "model.layers.4.mlp.experts.16.down_proj.weight"),
        (DEEPSEEK_V3, "decoder.layers.0.mlp.router.expert_bias", "model.layers.4.mlp.gate.e_score_correction_bias"),
        (LLAMA, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "model.layers.4.post_attention_layernorm.weight"),
        (LLAMA, "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "model.layers.4.input_layernorm.weight"),
    ],
)
def test_local_and_transformer_engine_names_are_found(hf: dict[str, Any], name: str, expected: str) -> None:
    # A chunk that starts at layer 4, on the rank whose first expert is 16.
    from megatron_rl.convert.live import _key

    family = family_for(hf)
    rows = {mcore: mapping.key for mapping in family.tensors for mcore in mapping.mcore}
    key = _key(name, rows, {0: 4, 1: 5}, 16, tied=False)
    slot = next(slot for slot in family.slots(family.shape(hf)) if slot.key == key)
    assert expected in slot.hf_names
