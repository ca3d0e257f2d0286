"""Which way weights travel, from the configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.config import Config, ModelFacts
from megatron_rl.sync.control import FleetControl, WeightSync
from megatron_rl.sync.disk import DiskSync
from megatron_rl.sync.distributed import DistributedSync


def open_sync(config: Config, facts: ModelFacts, fleet: FleetControl, device: torch.device, *, host: str | None = None) -> WeightSync:
    """The configured way, ready to push. Call it on the one rank that talks to the fleet.

    Args:
        device: where this rank's weights are.
        host: this machine's address as the servers see it, for sync.mode distributed; None finds it out.
    """
    dtype: torch.dtype = getattr(torch, config.rollout.dtype)
    if config.sync.mode == "distributed":
        return DistributedSync(fleet, config.sync, dtype=dtype, device=device, experts=facts.experts, host=host)
    folder = Path(config.sync.folder) if config.sync.folder is not None else Path(config.logging.dir) / "sync"
    return DiskSync(fleet, config.sync, model_path=Path(config.model.path), folder=folder, dtype=dtype, experts=facts.experts)
