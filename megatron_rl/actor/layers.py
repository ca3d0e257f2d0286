"""Layers that model families need and Megatron's specs lack, for the local implementation and Transformer Engine's alike."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron_rl_patches.megatron_core.norm import RMSNorm
from torch import Tensor

LATENT_EPS = 1e-6
"""What DeepSeek's and transformers' code add in the norms of latent attention, whatever rms_norm_eps says."""


class ProjectionNorm(MegatronModule):
    """RMS norm of queries or keys over all heads together (OLMoE), which tensor-parallel ranks divide.

    Megatron's own norms see one head at a time.
    """

    def __init__(self, config: TransformerConfig, heads: int) -> None:
        super().__init__(config)
        # With it Megatron would sum the gradient of everything called q_layernorm over tensor ranks, each of which has another part.
        assert not config.qk_layernorm
        assert config.kv_channels is not None
        self.width = heads * config.kv_channels
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(self.width // ps.get_tensor_model_parallel_world_size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, D] -> the same shape and dtype."""
        plain = x.float().flatten(-2)
        mine = plain.square().sum(-1, keepdim=True)
        # Forward the sum over ranks; backward the sum of their gradients, for each goes on with the total.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(mine))
        normed = (plain * torch.rsqrt(total / self.width + self.eps)).to(x.dtype)
        return (self.weight * normed).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Says over which axis ranks divide the weight."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets)


class SequenceLinear(MegatronModule):
    """A projection that every tensor rank holds whole and applies to its part of the sequence, without communication."""

    def __init__(self, config: TransformerConfig, rows: int, columns: int) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(self.weight)
        # Marked, Megatron sums its gradient over tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., columns] -> [..., rows], and no bias."""
        return torch.nn.functional.linear(x, self.weight), None


class ProjectionNormAttention(SelfAttention):
    """Attention with `ProjectionNorm`s, which go in afterwards: Megatron takes norms of a spec only together with `qk_layernorm`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        assert config.num_query_groups is not None
        self.q_layernorm = ProjectionNorm(config, config.num_attention_heads)
        self.k_layernorm = ProjectionNorm(config, config.num_query_groups)


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention with norms of their own epsilon, and down-projections that tensor ranks do not divide.

    Transformer Engine's spec does not divide them either. Megatron's local one does and gathers their output. The rotary key among it
    then goes into each rank's own heads, but the gather's backward keeps each rank's own gradient instead of the sum: silently wrong
    with tensor parallelism.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_kv_down_proj: Any
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, eps=LATENT_EPS)
        if config.q_lora_rank is not None:
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, eps=LATENT_EPS)
        if isinstance(self.linear_kv_down_proj, ColumnParallelLinear):
            self.linear_kv_down_proj = SequenceLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim, config.hidden_size)
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = SequenceLinear(config, config.q_lora_rank, config.hidden_size)


def repair_expert_bias(layer: RowParallelLinear) -> None:
    """Makes an expert's second layer with a bias trainable and its gradient right.

    Megatron marks the bias for a sum over tensor ranks, which hold different experts; and adds it to the output in place, which
    autograd refuses where a reduction over a single rank handed its input on.
    """
    layer.bias.sequence_parallel = False
    layer.register_forward_hook(_own_output)


def _own_output(layer: torch.nn.Module, inputs: Any, result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    output, bias = result
    return output.clone(), bias
