"""The policy as Megatron sees it: which implementation the machine allows, and the model chunks of this rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_rl_patches.megatron_core.norm import RMSNorm
from torch import Tensor

from ..config import Config, Dtype, ParallelConfig
from ..convert.families import Family
from .attention import PackedAttention
from .layers import LatentAttention, ProjectionNormAttention, repair_expert_bias
from .parallel import Mesh

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""model.recompute in Megatron's words."""


@dataclass(frozen=True)
class Implementation:
    """What the layers are made of on this machine."""

    layers: str
    """transformer_engine or local."""
    grouped_gemm: bool
    fused: bool
    """Whether fused kernels (RoPE, permutation, gradient accumulation, bias and dropout) are used."""
    reason: str

    def __str__(self) -> str:
        parts = [f"{self.layers} layers", "grouped GEMM" if self.grouped_gemm else "sequential experts"]
        parts.append("fused kernels" if self.fused else "plain kernels")
        return f"{', '.join(parts)} ({self.reason})"


def choose_implementation(*, cuda: bool, transformer_engine: bool, apex: bool) -> Implementation:
    """The fastest that the machine has.

    Args:
        cuda: a CUDA device is there.
        transformer_engine: the package imports.
        apex: the package is installed (fused gradient accumulation).
    """
    if cuda and transformer_engine:
        reason = "CUDA with Transformer Engine" + (" and apex" if apex else "")
        return Implementation("transformer_engine", grouped_gemm=True, fused=True, reason=reason)
    if cuda:
        return Implementation("local", grouped_gemm=False, fused=False, reason="CUDA without Transformer Engine: install it for speed")
    return Implementation("local", grouped_gemm=False, fused=False, reason="no CUDA")


def detect_implementation() -> Implementation:
    """`choose_implementation` for this machine. Transformer Engine is only imported where CUDA is: elsewhere its wheel raises."""
    cuda = torch.cuda.is_available()
    engine = False
    if cuda and importlib.util.find_spec("transformer_engine") is not None:
        from megatron.core.extensions import transformer_engine

        engine = bool(getattr(transformer_engine, "HAVE_TE", True))
    return choose_implementation(cuda=cuda, transformer_engine=engine, apex=importlib.util.find_spec("apex") is not None)


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states: `actor.logprobs` fuses the projection with the statistics."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """[V / TP, H] this rank's rows of the output projection, tied or not."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueHead(MegatronModule):
    """hidden -> one value a position. Every tensor rank holds the whole of it and sees every position."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """fp32 [T]."""
        return torch.nn.functional.linear(hidden_TH.float(), self.weight.float()).squeeze(-1)


class ValueModel(PolicyModel):
    """The policy's trunk under a value head. Its weights are never tied: the head has nothing in common with the embedding."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without what GPTModel adds for an output layer."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


def transformer_config(config: Config, family: Family, hf: Mapping[str, Any], how: Implementation, cuda: bool) -> TransformerConfig:
    """Megatron's configuration: the family's numbers, the run's layout, and what the machine allows.

    Raises:
        ValueError: config.json has something the family cannot compute, or the layout divides what Megatron cannot.
    """
    dtype = DTYPES[config.model.dtype]
    model, attributes = family.transformer_config(hf), family.config_attributes(hf)
    latent = model.get("multi_latent_attention", False)
    biased_experts = model["add_bias_linear"] and family.moe
    if biased_experts and (divided := config.parallel.expert_tensor_size) > 1:
        raise ValueError(
            f"parallel.expert_tensor: {divided} must be 1 for {family.name}, whose experts have biases; set parallel.expert above 1, "
            "or parallel.tensor to 1"
        )
    kind = MLATransformerConfig if latent else TransformerConfig
    built = kind(
        **model,
        **_layout(config.parallel),
        **RECOMPUTE[config.model.recompute],
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=how.grouped_gemm,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_permute_fusion=how.fused,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=not cuda,
        # Every parameter is filled from a checkpoint, yet initialisation must run: it alone marks weights as tensor-parallel, and
        # unmarked ones count once instead of once a rank in the gradient norm.
        perform_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        bias_activation_fusion=how.fused,
        bias_dropout_fusion=how.fused and not biased_experts,
        masked_softmax_fusion=how.fused,
        # The fused kernel for packed sequences knows nothing of YaRN's factor, nor of latent attention.
        apply_rope_fusion=how.fused and not latent and not attributes,
        gradient_accumulation_fusion=False,
        persist_layer_norm=how.layers == "transformer_engine",
        attention_softmax_in_fp32=True,
    )
    for name, value in attributes.items():
        setattr(built, name, value)
    return built


def _layout(p: ParallelConfig) -> dict[str, Any]:
    interleaved = p.virtual_pipeline is not None
    return {
        "tensor_model_parallel_size": p.tensor,
        "sequence_parallel": p.tensor > 1,
        "pipeline_model_parallel_size": p.pipeline,
        "virtual_pipeline_model_parallel_size": p.virtual_pipeline,
        "context_parallel_size": p.context,
        "expert_model_parallel_size": p.expert,
        "expert_tensor_parallel_size": p.expert_tensor_size,
        # Batched p2p with an interleaved schedule gives silently wrong losses on gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def layer_specs(config: TransformerConfig, family: Family, how: Implementation, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The block's layers: Transformer Engine's, or Megatron's local ones with norms that know sequence parallelism and attention that
    knows packing; in both, what the family needs and neither has."""
    engine = how.layers == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=None if engine else config.normalization, vp_stage=vp_stage
    )
    for layer in {id(spec): spec.submodules for spec in block.layer_specs}.values():
        attention = layer.self_attention.submodules
        if config.multi_latent_attention:
            layer.self_attention.module = LatentAttention
        if family.head_norm == "projection":
            layer.self_attention.module = ProjectionNormAttention
        if engine:
            continue
        attention.core_attention = PackedAttention
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        if family.head_norm == "head":
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if not engine:
        block.layer_norm = RMSNorm
    return block


def build_chunks(
    config: Config, family: Family, hf: Mapping[str, Any], mesh: Mesh, how: Implementation, kind: type[PolicyModel] = PolicyModel
) -> tuple[TransformerConfig, list[PolicyModel]]:
    """This rank's model chunks (one, or one a virtual pipeline stage), with uninitialised weights on the mesh's device.

    On the meta device they cannot be trained: Megatron's initialisation, which takes long there, is left out.
    """
    core = transformer_config(config, family, hf, how, mesh.device.type == "cuda")
    core.perform_initialization = mesh.device.type != "meta"
    virtual = config.parallel.virtual_pipeline
    chunks = []
    for vp_stage in range(virtual) if virtual else [None]:
        chunk = kind(
            config=core,
            transformer_layer_spec=layer_specs(core, family, how, vp_stage),
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            vp_stage=vp_stage,
            **family.gpt_model(hf, tensor_parallel=config.parallel.tensor),
        )
        chunks.append(chunk.to(device=mesh.device, dtype=core.params_dtype))
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            repair_expert_bias(module)
    return core, chunks
