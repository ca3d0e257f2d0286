"""What must be true of this process before `megatron.core` is imported. The packages that import it call `prepare` first."""

from __future__ import annotations

import warnings

import torch


def prepare() -> None:
    """On a machine without CUDA, applies the CPU patches and imports megatron.core under them; elsewhere nothing. Idempotent."""
    # Megatron warns at import of every optional package that a CPU machine cannot have, and calls collectives by their old names.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")
    if not torch.cuda.is_available():
        from megatron_rl_patches import megatron_core

        megatron_core.install()
