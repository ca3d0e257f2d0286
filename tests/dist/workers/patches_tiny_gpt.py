"""A two-layer MoE GPTModel with Megatron's DDP, DistributedOptimizer and schedules: the smallest thing that uses every patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB, SEQ, EXPERTS = 64, 16, 4


def _config(tp: int, ep: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=tp > 1,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )


def _model(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron_rl_patches.megatron_core.norm import RMSNorm

    layer = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm")
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = RMSNorm
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


class Trainer:
    """Model, optimizer and one fixed stream of batches, in the process group that is there. A context manager: it ends its groups."""

    def __init__(self, tp: int = 1, ep: int = 1, seed: int | None = None) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(1)
        self._parallel = parallel_state
        config = _config(tp, ep)
        self.model = _model(config)
        if seed is not None:
            self._randomise(seed)
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), self.model
        )
        # A large epsilon keeps the Adam update smooth in the gradient; at 1e-8 the first update is its sign, and parity is chance.
        optimizer = OptimizerConfig(
            optimizer="adam", lr=0.1, weight_decay=0.01, adam_eps=1e-3, clip_grad=1.0, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self._ddp], use_gloo_process_groups=False)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self._steps_done = 0

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._parallel.destroy_model_parallel()

    @torch.no_grad()
    def _randomise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)

    def shard(self, name: str, param: torch.Tensor, full: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's part of the parameter `name`, of tensors in the one-process layout."""
        if ".local_experts." in name:
            prefix, _, rest = name.partition(".local_experts.")
            local, _, suffix = rest.partition(".")
            per_rank = EXPERTS // self._parallel.get_expert_model_parallel_world_size()
            expert = int(local) + per_rank * self._parallel.get_expert_model_parallel_rank()
            return full[f"{prefix}.local_experts.{expert}.{suffix}"]
        if not getattr(param, "tensor_model_parallel", False):
            return full[name]
        size, rank = self._parallel.get_tensor_model_parallel_world_size(), self._parallel.get_tensor_model_parallel_rank()
        return full[name].chunk(size, dim=param.partition_dim)[rank]  # type: ignore[attr-defined]

    @torch.no_grad()
    def load(self, full: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of the weights of a one-process model, into the optimizer's main parameters too."""
        for name, param in self.model.named_parameters():
            param.copy_(self.shard(name, param, full))
        self.optimizer.reload_model_params()

    def step(self) -> dict[str, float]:
        """One step on 2 micro-batches of 2 sequences a data-parallel rank.

        Returns:
            loss: mean over this rank's tokens before the step. grad_norm: global, before clipping.
        """
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        generator = torch.Generator().manual_seed(100 + self._steps_done)
        tokens = torch.randint(0, VOCAB, (self._parallel.get_data_parallel_world_size(), 2, 2, SEQ + 1), generator=generator)
        self._steps_done += 1
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(tokens[self._parallel.get_data_parallel_rank()]),
            model=self._ddp,
            num_microbatches=2,
            seq_length=SEQ,
            micro_batch_size=2,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        return {"loss": sum(loss["sum"].item() for loss in losses) / (4 * SEQ), "grad_norm": float(grad_norm)}

    def parameters(self) -> torch.Tensor:
        """All model parameters of this rank, flat."""
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])

    def _adam_states(self) -> list[dict[str, torch.Tensor]]:
        return [state for part in self.optimizer.chained_optimizers for state in part.optimizer.state.values()]

    def steps(self) -> list[float]:
        """The different values of Adam's step over all parameters."""
        return sorted({state["step"].item() for state in self._adam_states()})

    def step_tensors_are_distinct(self) -> bool:
        """Whether no two parameters share their step."""
        pointers = [state["step"].data_ptr() for state in self._adam_states()]
        return len(pointers) > 1 and len(set(pointers)) == len(pointers)

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        state = {"model": self.model.sharded_state_dict()}
        metadata = {
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        return {**state, "optimizer": self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)}

    def save(self, folder: Path) -> None:
        """Write a torch_dist checkpoint of model and optimizer."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded_state(is_loading=False), str(folder))

    def load_checkpoint(self, folder: Path) -> None:
        """Read what `save` wrote; the batches go on where they were."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._sharded_state(is_loading=True), str(folder))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._steps_done = int(self.steps()[0])


def _forward_step(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    mask = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(SEQ).expand(2, SEQ)
    losses = model(input_ids=tokens[:, :-1], position_ids=positions, attention_mask=mask, labels=tokens[:, 1:].contiguous())
    return losses, lambda out: (out.float().sum(), torch.tensor(out.numel(), dtype=torch.int), {"sum": out.detach().sum()})
