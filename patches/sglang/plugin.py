"""What SGLang finds under the entry-point group ``sglang.srt.plugins`` and calls in every process of a server."""

from __future__ import annotations

import torch
from megatron_rl_patches.core import apply_patch

from .ledger import IN_PLUGIN


def register() -> None:
    """Apply ``ledger.IN_PLUGIN`` to this process. Where there is CUDA: nothing.

    Raises:
        RuntimeError: the installed SGLang was not tested.
    """
    if torch.cuda.is_available():
        return
    for patch in IN_PLUGIN:
        apply_patch(patch)
