"""DistributedDataParallel, Megatron's distributed optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from ..config import OptimizerConfig
from .model import PolicyModel


def wrap(core: TransformerConfig, chunks: list[PolicyModel]) -> list[DistributedDataParallel]:
    """Each chunk in DDP with fp32 gradient sums over data-parallel ranks.

    `calculate_per_token_loss` makes DDP sum instead of average, and `finalize_model_grads` gets no token count: the loss that
    arrives here is already this rank's share of the global one, so the sum of gradients is the gradient.
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False)
    wrapped = [DistributedDataParallel(core, settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    core.finalize_model_grads_func = _finalize
    return wrapped


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def build_optimizer(config: OptimizerConfig, core: TransformerConfig, wrapped: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Adam over this rank's shard of the fp32 master weights."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=True,
            params_dtype=core.params_dtype,
            bf16=core.bf16,
            fp16=core.fp16,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    core.grad_scale_func = optimizer.scale_loss
    return optimizer


def parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers inside one: with expert parallelism, dense weights' and experts'."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`: linear warm-up, then constant, linear or cosine decay to min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    remaining = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * remaining


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Sets every parameter group's rate, keeping a group's own multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
