"""Weight updates through a folder that trainer and servers both see: a whole checkpoint a version, then /update_weights_from_disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.config import SyncConfig
from megatron_rl.convert.hf import HfWriter
from megatron_rl.sync.checksums import Checksums
from megatron_rl.sync.control import FleetControl, check_checksums, check_versions, flush, guarded
from megatron_rl.sync.plan import cast

KEEP = 2
"""Folders that stay: the one the servers loaded and the one before, which a server that is late may still read."""


class DiskSync:
    """A `WeightSync` through `folder`.

    Args:
        fleet: the servers; nothing may be in flight during `push`.
        model_path: the checkpoint folder whose config.json and tokenizer go with the weights.
        folder: gets version_000001/ and so on, each a Hugging Face checkpoint; the newest two stay.
        dtype: what the servers compute in.
        experts: of the model, for checksums.
    """

    def __init__(
        self, fleet: FleetControl, config: SyncConfig, *, model_path: Path, folder: Path, dtype: torch.dtype, experts: int
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._model_path = model_path
        self._folder = folder
        self._dtype = dtype
        self._experts = experts
        self._verified = False

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See `WeightSync.push`."""
        timeout = self._config.timeout
        verify = self._config.verify == "always" or (self._config.verify == "first" and not self._verified)
        checksums = Checksums(self._experts)
        stream = cast(weights, self._dtype)
        if verify:
            stream = checksums.observe(stream)
        with guarded(self._fleet, version) as step:
            step("write the checkpoint")
            target = self._folder.absolute() / f"version_{version:06d}"
            shutil.rmtree(target, ignore_errors=True)
            with HfWriter(target, self._model_path) as writer:
                for name, tensor in stream:
                    writer.add(name, tensor)
            step("flush before")
            flush(self._fleet, timeout)
            step("load from disk")
            body = {"model_path": str(target), "weight_version": str(version), "flush_cache": True}
            self._fleet.command("/update_weights_from_disk", [body] * len(self._fleet.urls), timeout=timeout).result()
            step("verify version")
            check_versions(self._fleet, version)
            if verify:
                step("verify checksums")
                check_checksums(self._fleet, checksums, timeout)
                self._verified = True
        self._remove_old()

    def close(self) -> None:
        """Nothing is kept open."""

    def _remove_old(self) -> None:
        """By age, not by number: a run resumed from an earlier step writes lower numbers than those that lie there."""
        for old in sorted(self._folder.glob("version_*"), key=lambda path: path.stat().st_mtime)[:-KEEP]:
            shutil.rmtree(old)
