"""No torch.compile inside Megatron: on a CPU it costs seconds of import and a C++ compiler, and fuses nothing that matters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED, V0_19


@contextlib.contextmanager
def _without_torch_compile() -> Iterator[None]:
    """torch.compile returns its argument, inside the block only."""
    compile_: Any = torch.compile
    torch.compile = lambda model=None, **options: (lambda f: f) if model is None else model  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


def import_without_compile() -> None:
    """Import megatron.core (for the first time) with its `jit_fuser` an identity; torch.compile itself is as before afterwards."""
    with _without_torch_compile():
        import megatron.core.jit
        import megatron.core.transformer.moe.moe_layer  # 0.19 decorates its inference router with @torch.compile

    megatron.core.jit.disable_jit_fuser()


JIT_FUSER = Patch(
    name="jit-fuser",
    dependency=MEGATRON_CORE,
    reason="jit_fuser is torch.compile: the import takes 4.7 CPU-seconds instead of 2.1, and the first call compiles C++.",
    upstream="none",
    versions=TESTED,
    removal="megatron.core lets the caller disable jit_fuser before its modules bind it",
    anchors=(
        Anchor("jit.py", r"^            jit_fuser = torch\.compile$"),
        Anchor("jit.py", r"^def disable_jit_fuser\(\):$"),
        Anchor("transformer/moe/router.py", r"^    @torch\.compile$", (V0_19,)),
    ),
    apply=import_without_compile,
)
