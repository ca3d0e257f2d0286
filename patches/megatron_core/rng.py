"""Megatron's "CUDA random state" is the state of the CPU generator."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _set_tracked_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _not_about_the_cpu_stream(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def seed_the_cpu_generator() -> None:
    """torch.cuda's get, set and seed act on the CPU generator (torch queues them until CUDA starts: for ever)."""
    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = _get_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_rng_state
    cuda.manual_seed = cuda.random.manual_seed = _manual_seed


def restore_tracked_states() -> None:
    """`CudaRNGStatesTracker.fork` sets and restores states of the CPU generator.

    The tracker warns when the CPU stream moved inside a fork; here that stream is the forked one, so the warning says nothing.
    """
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = _set_tracked_state
    logging.getLogger(random.__name__).addFilter(_not_about_the_cpu_stream)


CUDA_SEED = Patch(
    name="cuda-seed",
    dependency=MEGATRON_CORE,
    reason="torch.cuda.get_rng_state raises without CUDA, and torch.cuda.manual_seed is queued for ever.",
    upstream="none",
    versions=TESTED,
    removal="the tracker takes its generator from the device in use",
    anchors=(
        Anchor("tensor_parallel/random.py", r"return torch\.cuda\.random\.get_rng_state\(device=device\)"),
        Anchor("tensor_parallel/random.py", r"torch\.cuda\.manual_seed\(seed\)"),
    ),
    apply=seed_the_cpu_generator,
)

RNG_FORK = Patch(
    name="rng-fork",
    dependency=MEGATRON_CORE,
    reason="_set_cuda_rng_state is queued by torch.cuda._lazy_call for ever, so fork() and restore do nothing, in silence.",
    upstream="none",
    versions=TESTED,
    removal="the tracker takes its generator from the device in use",
    anchors=(
        Anchor("tensor_parallel/random.py", r"^def _set_cuda_rng_state\(new_state: torch\.Tensor, device: int = -1, graph_safe"),
        Anchor("tensor_parallel/random.py", r"^    _lazy_call\(cb\)"),
        Anchor("tensor_parallel/random.py", r"CPU RNG state changed within GPU RNG context"),
    ),
    apply=restore_tracked_states,
)
