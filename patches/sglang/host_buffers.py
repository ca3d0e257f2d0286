"""Host buffers on a machine without CUDA are ordinary memory."""

from __future__ import annotations

from typing import Any

import torch
from megatron_rl_patches.core import Anchor, Patch

from .version import SGLANG, TESTED


def plain_host_buffer(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Allocate without pinning or registration; the signature is that of SGLang's allocators."""
    return torch.empty(dims, dtype=dtype, device=device)


def install_plain_host_buffers() -> None:
    """Enter the rule for ``"cpu"`` into SGLang's table of allocators by device."""
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_host_buffer


HOST_BUFFERS = Patch(
    name="host-buffers",
    dependency=SGLANG,
    reason="The buffer of --enable-return-routed-experts is registered through torch.cuda.cudart(), on a CPU too.",
    upstream="none",
    versions=TESTED,
    removal="SGLang's table has a rule for cpu",
    anchors=(
        Anchor("srt/mem_cache/pool_host/common.py", r"^ALLOC_MEMORY_FUNCS = defaultdict\(\n    lambda: alloc_with_host_register,$"),
        Anchor("srt/state_capturer/base.py", r"^        alloc = ALLOC_MEMORY_FUNCS\[device\]$"),
    ),
    apply=install_plain_host_buffers,
)
