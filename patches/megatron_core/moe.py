"""Mixture-of-experts modules: splits as numbers, and two names that need packages a CPU machine lacks."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED, V0_16, V0_19

_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def _kernel_missing(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("paged stash is a Triton kernel and needs CUDA: leave moe_paged_stash off on a CPU")


def stand_in_for_paged_stash() -> None:
    """Put a module without kernels where 0.19's `moe/ops/paged_stash.py`, which imports triton unguarded, would be imported."""
    module: Any = types.ModuleType(_PAGED_STASH)
    module.GLOBAL_BLOCK_SIZE = 1024
    module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = _kernel_missing
    sys.modules[_PAGED_STASH] = module


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`maybe_move_tensor_to_cpu` for tensors that are there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def splits_as_numpy() -> None:
    """`as_numpy=True` means numpy also for a tensor that is on the CPU already."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu


def bind_te_general_gemm() -> None:
    """0.16 binds `te_general_gemm` only where Transformer Engine is, and reads it everywhere."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


PAGED_STASH = Patch(
    name="paged-stash",
    dependency=MEGATRON_CORE,
    reason="moe/ops/paged_stash.py imports triton unguarded, so importing the schedules or GPTModel fails without triton.",
    upstream="NVIDIA/Megatron-LM#6891",
    versions=(V0_19,),
    removal="the pull request is in a release",
    anchors=(
        Anchor("transformer/moe/ops/paged_stash.py", r"^import triton$"),
        Anchor(
            "transformer/moe/ops/paged_stash.py", r'__all__ = \["GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"\]'
        ),
        Anchor("transformer/moe/paged_stash.py", r"^from megatron\.core\.transformer\.moe\.ops\.paged_stash import"),
    ),
    apply=stand_in_for_paged_stash,
)

ALLTOALL_SPLITS = Patch(
    name="alltoall-splits",
    dependency=MEGATRON_CORE,
    reason="maybe_move_tensor_to_cpu(as_numpy=True) leaves CPU tensors as they are; the alltoall dispatcher then takes them for sizes.",
    upstream="none",
    versions=TESTED,
    removal="maybe_move_tensor_to_cpu honours as_numpy for CPU tensors",
    anchors=(
        Anchor("transformer/moe/moe_utils.py", r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:\s+cpu_tensor = tensor\.to\("),
        Anchor("transformer/moe/token_dispatcher.py", r"^    maybe_move_tensor_to_cpu,$"),
    ),
    apply=splits_as_numpy,
)

TE_GENERAL_GEMM = Patch(
    name="te-general-gemm",
    dependency=MEGATRON_CORE,
    reason="the router GEMM reads te_general_gemm, which is bound only where Transformer Engine is: NameError.",
    upstream="none (0.19 binds it to None)",
    versions=(V0_16,),
    removal="0.16 is no longer supported",
    anchors=(
        Anchor("transformer/moe/moe_utils.py", r"^        te_general_gemm,\n    \)\n\n    HAVE_TE = True"),
        Anchor("transformer/moe/moe_utils.py", r"if te_general_gemm is not None and router_dtype"),
    ),
    apply=bind_te_general_gemm,
)
