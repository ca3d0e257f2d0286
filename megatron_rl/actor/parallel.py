"""Where this process stands: ranks, groups and device. Everything else in `actor` asks the `Mesh`, not the environment."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import ParallelConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and the groups the product itself talks over; Megatron keeps its own in `parallel_state`."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    device: torch.device
    backend: str
    """nccl or gloo: what tensors travel over."""
    control_group: dist.ProcessGroup
    """All ranks over gloo, for small host objects."""
    replica_group: dist.ProcessGroup
    """The ranks that train on the same samples (one data-parallel index: TP x CP x PP), over gloo."""
    replica_ranks: tuple[int, ...]
    context_group: dist.ProcessGroup
    """The ranks that share the positions of this rank's micro-batches, over `backend`."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank collects for its data-parallel group and hands out shards."""
        return self.rank == self.replica_ranks[0]

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to people."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank sees the log-probs."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank's metric sums count: one tensor rank of each last stage, so that nothing counts twice."""
        return self.is_last_stage and self.tensor_rank == 0

    def scatter(self, shards: Iterable[Any] | None) -> tuple[Any, int]:
        """Hands each rank of the replica its own object; the leader passes one a rank, in the order of `replica_ranks`, its own first.

        They are taken one after another: the leader never holds more than its own and the one on its way.

        From rank to rank, because torch's scatter of objects pads all of them to the largest.

        Returns:
            The object, and the bytes that reached this rank for it (0 on the leader).
        """
        if shards is not None:
            remaining = iter(shards)
            mine = next(remaining)
            for rank, shard in zip(self.replica_ranks[1:], remaining, strict=True):
                data = torch.frombuffer(packed_object(shard), dtype=torch.uint8)
                dist.send(torch.tensor([data.numel()]), rank, group=self.replica_group)
                dist.send(data, rank, group=self.replica_group)
            return mine, 0
        leader = self.replica_ranks[0]
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, leader, group=self.replica_group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, leader, group=self.replica_group)
        return pickle.loads(data.numpy().data), data.numel() + size.nbytes

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, in order of rank, on every rank."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.control_group)
        return out

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The source's object on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.control_group)
        return box[0]

    def barrier(self) -> None:
        """Waits for every rank, on the host."""
        dist.barrier(group=self.control_group)


def packed_object(value: Any) -> bytearray:
    """What `Mesh.scatter` sends of an object. A tensor that is a view takes its whole storage along: hand over copies."""
    return bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def prepare_process(threads: int) -> None:
    """CPU threads of this rank; 0 leaves torch's default."""
    if threads:
        torch.set_num_threads(threads)


def launch_context() -> tuple[int, int, int]:
    """(rank, local rank, world size) that torchrun gave this process; (0, 0, 1) without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def create_mesh(parallel: ParallelConfig, seed: int = 0) -> Mesh:
    """Joins torchrun's process group (or forms one of a single process) and lays Megatron's groups over it.

    A second call in one process lays a new layout over the same ranks.

    Raises:
        ValueError: the layout does not fit the number of ranks.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank, local_rank, world_size = launch_context()
    parallel.check_world_size(world_size)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _forget_groups()
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed + 1)
    control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    data_rank = ps.get_data_parallel_rank()
    replica_group, replica_ranks = _replica_group(data_rank, control, world_size)
    return Mesh(
        rank=rank,
        world_size=world_size,
        tensor_rank=ps.get_tensor_model_parallel_rank(),
        tensor_size=parallel.tensor,
        pipeline_rank=ps.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel.pipeline,
        context_rank=ps.get_context_parallel_rank(),
        context_size=parallel.context,
        data_rank=data_rank,
        data_size=ps.get_data_parallel_world_size(),
        device=device,
        backend=backend,
        control_group=control,
        replica_group=replica_group,
        replica_ranks=replica_ranks,
        context_group=ps.get_context_parallel_group(),
    )


def _forget_groups() -> None:
    """Ends every group but the default one: Megatron only drops its references, and each gloo group keeps threads that spin."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    whole = dist.group.WORLD
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not whole]:
        dist.destroy_process_group(group)


def _replica_group(data_rank: int, control: dist.ProcessGroup, world_size: int) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The gloo group of the ranks that share `data_rank`. Every rank takes part in creating every group."""
    all_ranks: list[int] = [0] * world_size
    dist.all_gather_object(all_ranks, data_rank, group=control)
    mine: tuple[dist.ProcessGroup, tuple[int, ...]] | None = None
    for index in range(max(all_ranks) + 1):
        members = [r for r, d in enumerate(all_ranks) if d == index]
        group = dist.new_group(members, backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        if index == data_rank:
            mine = (group, tuple(members))
    assert mine is not None
    return mine


def destroy_mesh() -> None:
    """Leaves every group; without it gloo ranks sometimes abort at exit."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
