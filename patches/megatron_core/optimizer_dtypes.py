"""Megatron's optimizer sorts parameters by the name of their CUDA tensor type; on a CPU that name has no "cuda" in it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED

_torch_type = torch.Tensor.type


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`; asked for the name by megatron.core.optimizer, "torch.FloatTensor" becomes "torch.cuda.FloatTensor"."""
    result = _torch_type(self, *args, **kwargs)
    if args or kwargs or not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
        return result
    return result.replace("torch.", "torch.cuda.", 1)


def name_cuda_types() -> None:
    """Let `param.type()` in megatron.core.optimizer answer with the CUDA name."""
    tensor: Any = torch.Tensor
    tensor.type = _type


OPTIMIZER_DTYPES = Patch(
    name="optimizer-dtypes",
    dependency=MEGATRON_CORE,
    reason="the optimizers compare param.type() with 'torch.cuda.FloatTensor' and raise TypeError for anything else.",
    upstream="none",
    versions=TESTED,
    removal="the optimizers compare param.dtype",
    anchors=(
        Anchor("optimizer/distrib_optimizer.py", r"model_param\.type\(\) == 'torch\.cuda\.FloatTensor'"),
        Anchor("optimizer/optimizer.py", r"param\.type\(\) == 'torch\.cuda\.FloatTensor'"),
        Anchor("optimizer/clip_grads.py", r"param\.grad\.type\(\) == 'torch\.cuda\.FloatTensor'"),
    ),
    apply=name_cuda_types,
)
