"""RMSNorm for the local layer spec under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the weight marked for the sequence-parallel gradient all-reduce.

    Name it in a layer spec where Megatron's local spec has `WrappedTorchNorm`, which refuses sequence parallelism (and an MoE with
    TP > 1 needs sequence parallelism).

    Args:
        config: the `TransformerConfig`; `params_dtype` and `sequence_parallel` are read.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        options: what Megatron passes to other norms (`persist_layer_norm`, `zero_centered_gamma`, ...); not used by this one.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **options: Any) -> None:
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma=True: this RMSNorm multiplies by weight, not by 1 + weight. Set it to False.")
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


SP_RMSNORM = Patch(
    name="sp-rmsnorm",
    dependency=MEGATRON_CORE,
    reason="WrappedTorchNorm refuses sequence parallelism, which an MoE with TP > 1 needs.",
    upstream="none",
    versions=TESTED,
    removal="WrappedTorchNorm marks its weight sequence_parallel",
    anchors=(Anchor("transformer/torch_norm.py", r"assert not config\.sequence_parallel"),),
    apply=None,
    cpu_only=False,
)
