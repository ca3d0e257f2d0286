"""Random draws that belong to a token, not to a process: equal on every rank, in every recomputation, under every layout."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's, as signed 64-bit integers
_GOLDEN = -0x61C8864680B583EB


def token_uniforms(sample_T: Tensor, position_T: Tensor, seed: int) -> Tensor:
    """[T] fp32 uniforms in [0, 1), a hash (splitmix64) of (seed, sample, position).

    Args:
        sample_T: int64, identifies the trajectory within the step.
        position_T: int64, position inside the trajectory.
        seed: of the run and step.
    """
    key_T = _mix(torch.full_like(sample_T, seed, dtype=torch.int64) + _GOLDEN)
    key_T = _mix(key_T ^ (sample_T.long() + _GOLDEN))
    key_T = _mix(key_T ^ (position_T.long() + _GOLDEN))
    return _shift_right(key_T, 40).float() / (1 << 24)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)
