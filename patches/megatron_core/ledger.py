"""The patches of megatron-core in the order they are applied, and the one call that applies them."""

from __future__ import annotations

import sys

import torch

from ..core import Patch, apply_patch, check_version, is_active
from .collectives import UNEVEN_COLLECTIVES
from .device import CUDA_FACADE
from .factories import CUDA_LITERALS
from .jit import JIT_FUSER
from .latent import LATENT_ATTENTION_TE
from .moe import ALLTOALL_SPLITS, PAGED_STASH, TE_GENERAL_GEMM
from .norm import SP_RMSNORM
from .optimizer_checkpoint import OPTIMIZER_CHECKPOINT
from .optimizer_dtypes import OPTIMIZER_DTYPES
from .rng import CUDA_SEED, RNG_FORK
from .version import MEGATRON_CORE, TESTED

BEFORE_IMPORT: tuple[Patch, ...] = (CUDA_FACADE, CUDA_LITERALS, CUDA_SEED, OPTIMIZER_DTYPES, PAGED_STASH)
"""Changes to torch, and a module that must stand in before Megatron imports it."""

AFTER_IMPORT: tuple[Patch, ...] = (
    RNG_FORK,
    ALLTOALL_SPLITS,
    TE_GENERAL_GEMM,
    LATENT_ATTENTION_TE,
    UNEVEN_COLLECTIVES,
    OPTIMIZER_CHECKPOINT,
)
"""Changes to modules of megatron.core."""

PATCHES: tuple[Patch, ...] = (*BEFORE_IMPORT, JIT_FUSER, *AFTER_IMPORT, SP_RMSNORM)
"""All of them in the order of application; JIT_FUSER is the one that imports megatron.core."""


def install() -> None:
    """Make megatron.core importable and right on a machine without CUDA, and import it. With CUDA: nothing.

    Call it before the first `import megatron.core` of the process. Calling it again does nothing.

    Raises:
        RuntimeError: the installed megatron-core was not tested, or it was imported before this call.
        ModuleNotFoundError: megatron-core is not installed.
    """
    if torch.cuda.is_available() or is_active(JIT_FUSER):
        return
    version = check_version(MEGATRON_CORE, TESTED, "megatron_rl_patches.megatron_core")
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before megatron_rl_patches.megatron_core.install(): its modules have bound torch.compile already. "
            "Call install() before the first import of megatron.core."
        )
    for patch in PATCHES:
        if patch.apply is not None and patch.applies_to(version):
            apply_patch(patch)
