"""Weight updates by broadcast: one process group of this rank and every tensor-parallel rank of every server.

SGLang 0.5.23: /init_weights_update_group once, then for each update /begin_weight_update, one /update_weights_from_distributed a
bucket while this rank broadcasts it, /end_weight_update. gloo on CPU, NCCL on CUDA.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from megatron_rl.config import SyncConfig
from megatron_rl.sync.checksums import Checksums
from megatron_rl.sync.control import FleetControl, check_checksums, check_versions, flush, guarded
from megatron_rl.sync.plan import Bucket, buckets, cast, mark_last

LOST_PEER = 15.0
"""Seconds until a broken connection has also broken the request to the same server."""


class DistributedSync:
    """A `WeightSync` over a process group that stays open.

    Args:
        fleet: the servers; nothing may be in flight during `push`.
        dtype: what the servers compute in.
        device: where the weights travel: cpu takes gloo, cuda NCCL.
        experts: of the model, for checksums.
        host: this machine's address as the servers see it; None takes the one that leads to the first server.

    Raises:
        WeightUpdateError: the group could not be formed.
    """

    def __init__(
        self, fleet: FleetControl, config: SyncConfig, *, dtype: torch.dtype, device: torch.device, experts: int, host: str | None = None
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._dtype = dtype
        self._device = device
        self._experts = experts
        self._verified = False
        # SGLang refuses a name it has seen: a trainer that crashed may have left its group there
        self._name = f"megatron_rl_{uuid.uuid4().hex[:8]}"
        self._group = self._form_group(host or address_towards(fleet.urls[0]))

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See `WeightSync.push`."""
        timeout = self._config.timeout
        verify = self._config.verify == "always" or (self._config.verify == "first" and not self._verified)
        checksums = Checksums(self._experts)
        stream = cast(weights, self._dtype)
        if verify:
            stream = checksums.observe(stream)
        with guarded(self._fleet, version) as step:
            step("flush before")
            flush(self._fleet, timeout)
            step("begin")
            self._fleet.command("/begin_weight_update", [{}] * len(self._fleet.urls), timeout=timeout).result()
            step("broadcast")
            for bucket, last in mark_last(buckets(stream, int(self._config.bucket_mb * 1e6))):
                self._send(bucket, str(version) if last else None)
            step("end")
            self._fleet.command("/end_weight_update", [{}] * len(self._fleet.urls), timeout=timeout).result()
            step("flush after")
            flush(self._fleet, timeout)
            step("verify version")
            check_versions(self._fleet, version)
            if verify:
                step("verify checksums")
                check_checksums(self._fleet, checksums, timeout)
                self._verified = True

    def close(self) -> None:
        """Leaves the group, at both ends."""
        with suppress(RuntimeError):  # a server that is gone has left already
            self._fleet.command(
                "/destroy_weights_update_group", [{"group_name": self._name}] * len(self._fleet.urls), timeout=20.0
            ).result()
        dist.destroy_process_group(self._group)

    def _form_group(self, host: str) -> Any:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        sizes = self._fleet.tensor_sizes
        world = 1 + sum(sizes)
        timeout = timedelta(seconds=self._config.timeout)
        with guarded(self._fleet, 0) as step:
            step("form the process group")
            store = TCPStore(host, 0, world, is_master=True, timeout=timeout, wait_for_workers=False)
            offsets = accumulate(sizes, initial=1)
            bodies = [
                {
                    "master_address": host,
                    "master_port": store.port,
                    "rank_offset": offset,
                    "world_size": world,
                    "group_name": self._name,
                    "backend": backend,
                }
                for offset, _ in zip(offsets, sizes, strict=False)
            ]
            joined = self._fleet.command("/init_weights_update_group", bodies, timeout=self._config.timeout)
            group: Future[Any] = Future()
            # a daemon: joining cannot be interrupted, and must not outlive a server's refusal
            Thread(target=_join, args=(group, backend, PrefixStore(self._name, store), world, self._name, timeout), daemon=True).start()
            _first_error(group, joined)
        return group.result()

    def _send(self, bucket: Bucket, version: str | None) -> None:
        body = {**bucket.request(), "group_name": self._name, "flush_cache": False, "weight_version": version}
        answers = self._fleet.command("/update_weights_from_distributed", [body] * len(self._fleet.urls), timeout=self._config.timeout)
        _await_both(self._group.broadcast(bucket.flat.to(self._device), 0), answers, self._config.timeout)


def address_towards(url: str) -> str:
    """The address of this machine from which `url` is reached."""
    target = urlsplit(url)
    assert target.hostname is not None, f"{url} has no host"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0])


def _join(result: Future[Any], backend: str, store: PrefixStore, world: int, name: str, timeout: timedelta) -> None:
    """Becomes rank 0 of a group beside the default one, whose members share no default group; torch has no public function for it.

    The keys in the store are those of sglang/srt/utils/common.py, init_custom_process_group.
    """
    try:
        group, _ = _new_process_group_helper(
            world, 0, [], Backend(backend), store, group_name=GroupName(name), backend_options=None, timeout=timeout
        )
    except Exception as error:  # noqa: BLE001  the thread that waits raises it
        result.set_exception(error)
    else:
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}  # destroy_process_group asks for it
        result.set_result(group)


def _first_error(*futures: Future[Any]) -> None:
    """Waits for all, or until one fails, and raises its error."""
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()


def _await_both(work: Any, answers: Future[list[dict[str, Any]]], timeout: float) -> None:
    """Waits for the broadcast and the servers' answers; a refusal ends the wait, because nobody would take the broadcast then."""
    deadline = time.monotonic() + timeout
    pause = 1e-4
    while not work.is_completed():
        if answers.done():
            answers.result()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the broadcast did not end within sync.timeout = {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    try:
        work.wait()
    except RuntimeError:
        wait([answers], LOST_PEER)
        if answers.done():
            answers.result()  # a server that ended broke the broadcast, and its own error says more
        raise
    answers.result()
