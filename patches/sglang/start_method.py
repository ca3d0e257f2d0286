"""On a CPU, fork the processes of a server instead of spawning them."""

from __future__ import annotations

import multiprocessing
from typing import Any

from megatron_rl_patches.core import Anchor, Patch

from .version import SGLANG, TESTED


def use_fork(result: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after SGLang's ``_set_envs_and_config``, which has just asked for spawn."""
    multiprocessing.set_start_method("fork", force=True)


def hook_start_method() -> None:
    """Register the hook; ``load_plugins`` puts it in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", use_fork, HookType.AFTER)


START_METHOD = Patch(
    name="fork-start",
    dependency=SGLANG,
    reason="Each spawned process imports SGLang again, about 14 CPU-seconds and 0.5 GiB each. SGLang spawns because CUDA cannot be "
    "forked; here there is none, and the launcher forks before it starts a thread.",
    upstream="none",
    versions=TESTED,
    removal="SGLang chooses the start method by device, or imports in about a second",
    anchors=(Anchor("srt/entrypoints/engine.py", r'^    mp\.set_start_method\("spawn", force=True\)$'),),
    apply=hook_start_method,
)
