"""Uneven gathers and scatters along the first dimension, which gloo refuses, as all-to-alls, which it does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED


def gather_uneven(input_: torch.Tensor, group: Any, output_split_sizes: list[int]) -> torch.Tensor:
    """Every rank's rows, in rank order.

    Args:
        input_: [n_r, ...], this rank's rows.
        group: process group of W ranks.
        output_split_sizes: n_r of every rank, W numbers.

    Returns:
        [sum(n_r), ...].
    """
    world = group.size()
    output = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
    copies = input_.repeat(world, *[1] * (input_.dim() - 1))  # all-to-all sends each rank its own copy
    dist.all_to_all_single(output, copies, list(output_split_sizes), [input_.shape[0]] * world, group=group)
    return output


def reduce_scatter_uneven(input_: torch.Tensor, group: Any, input_split_sizes: list[int]) -> torch.Tensor:
    """This rank's rows of the sum over ranks.

    Args:
        input_: [sum(n_r), ...], a summand for the rows of every rank.
        group: process group of W ranks.
        input_split_sizes: n_r of every rank, W numbers.

    Returns:
        [n_r, ...], summed in rank order.
    """
    world, rows = group.size(), input_split_sizes[group.rank()]
    summands = input_.new_empty((world * rows, *input_.shape[1:]))
    dist.all_to_all_single(summands, input_.contiguous(), [rows] * world, list(input_split_sizes), group=group)
    return summands.view(world, rows, *input_.shape[1:]).sum(0)


def uneven_through_alltoall() -> None:
    """Give `tensor_parallel.mappings` the two functions above for calls that name split sizes; even calls are as before."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        return gather_uneven(input_, group, output_split_sizes)

    def reduce_scatter_along_first_dim(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, None, use_global_buffer)
        return reduce_scatter_uneven(input_, group, input_split_sizes)

    mappings._gather_along_first_dim = gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


UNEVEN_COLLECTIVES = Patch(
    name="uneven-collectives",
    dependency=MEGATRON_CORE,
    reason="gloo refuses all_gather and reduce_scatter of unequal lists, which the alltoall dispatcher does when expert TP > 1.",
    upstream="none (a limit of gloo)",
    versions=TESTED,
    removal="gloo takes unequal lists, or Megatron stops sending them",
    anchors=(
        Anchor("tensor_parallel/mappings.py", r"^def _gather_along_first_dim\(input_, group, output_split_sizes=None, use_global_buffer"),
        Anchor("tensor_parallel/mappings.py", r"^def _reduce_scatter_along_first_dim\(input_, group, input_split_sizes=None, use_global"),
        Anchor("tensor_parallel/mappings.py", r"torch\.distributed\.all_gather\(output_tensor_list, input_, group=group\)"),
        Anchor("tensor_parallel/mappings.py", r"torch\.distributed\.reduce_scatter\(output, input_tensor_list, group=group\)"),
    ),
    apply=uneven_through_alltoall,
)
