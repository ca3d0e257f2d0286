"""Overlong reward shaping of DAPO (2503.14476): a penalty that grows with the length near the limit. Evidence [D][C].

    0                                          up to max_length - buffer tokens
    -penalty (n - max_length + buffer)/buffer  inside the buffer
    -penalty                                   from max_length on

Added to the answer's reward before advantages are taken. Published: 20480 = 16384 + a buffer of 4096, penalty 1. Runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .objective import Method
from .params import MethodParams


@dataclass(frozen=True)
class OverlongConfig(MethodParams):
    """Parameters of `overlong`."""

    buffer: int = 4096
    """Tokens over which the penalty grows; DAPO's is a fifth of max_length."""
    max_length: int | None = None
    """Loss tokens at which the penalty is whole; null takes rollout.max_new_tokens."""
    penalty: float = 1.0
    """Largest penalty, in units of the reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("buffer", self.buffer >= 1, "must be at least 1; DAPO's is a fifth of max_length")
        self.require("max_length", self.max_length is None or self.max_length >= self.buffer, f"is less than buffer = {self.buffer}")
        self.require("penalty", self.penalty >= 0, "must not be negative; DAPO's value is 1")


def overlong_penalty(lengths: Sequence[int], config: OverlongConfig, max_new_tokens: int) -> NDArray[np.float32]:
    """[n] what each answer's length in loss tokens adds to its reward.

    Raises:
        ValueError: max_length is null and the buffer does not fit into rollout.max_new_tokens.
    """
    limit = max_new_tokens if config.max_length is None else config.max_length
    if config.buffer > limit:
        raise ValueError(f"{config.where}.buffer: {config.buffer} exceeds rollout.max_new_tokens = {limit}; DAPO's buffer is a fifth of it")
    over = np.asarray(lengths, dtype=np.float64) - (limit - config.buffer)
    return (config.penalty * np.clip(-over / config.buffer, -1.0, 0.0)).astype(np.float32)


METHOD = Method(
    name="overlong",
    kind="data",
    config=OverlongConfig,
    apply=None,
    paper="2503.14476",
    evidence="DC",
    unit="sequence",
    summary="Lowers the reward of answers that come close to the length limit",
)
