"""This project's methods on a mini-batch of plain sequences. (verl's wheel brings a package named `tests`, which hides tests/unit.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.methods import registry
from megatron_rl.methods.objective import Denominators, Tokens
from megatron_rl.methods.segments import LocalSegments
from megatron_rl.methods.stack import Stack

MAX_TOKENS = 7
"""The constant of seq-mean-token-sum-norm, in ours and in theirs."""
PADDING = 3


@dataclass(frozen=True)
class Seq:
    """One trajectory's positions, [N] each. `mask` False marks tool tokens."""

    logp: Tensor
    old: Tensor
    mu: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    """bool."""


@dataclass(frozen=True)
class Outcome:
    """The loss of a mini-batch and its gradient for each sequence."""

    loss: float
    grads: list[Tensor]
    metrics: dict[str, float]


def stack(
    objective: str, params: Mapping[str, Any] | None = None, corrections: Sequence[tuple[str, dict]] = (), aggregation: str | None = None
) -> Stack:
    """A stack from names."""
    return registry.build(
        ObjectiveConfig(objective, params or {}, aggregation),  # type: ignore[arg-type]
        [MethodConfig(name, p) for name, p in corrections],
    )


def denominators(batch: Sequence[Seq]) -> Denominators:
    """Counted over the whole mini-batch, as the loop does."""
    return Denominators(float(sum(int(s.mask.sum()) for s in batch)), float(sum(bool(s.mask.any()) for s in batch)), MAX_TOKENS)


def segments_of(batch: Sequence[Seq]) -> LocalSegments:
    """The packed sequences and some padding."""
    sequence_T = torch.cat([torch.full_like(s.mask, i, dtype=torch.int64) for i, s in enumerate(batch)])
    pad = torch.nn.functional.pad
    mask_T = pad(torch.cat([s.mask for s in batch]), (0, PADDING), value=False)
    return LocalSegments(pad(sequence_T, (0, PADDING), value=len(batch)), mask_T, len(batch))


def pack(batch: Sequence[Seq], leaves: Sequence[Tensor], totals: dict[str, Tensor] | None = None) -> Tokens:
    """One micro-batch. NaN stands in padding and at tool tokens: whatever a peer makes of its own, nothing may come of ours."""
    segments = segments_of(batch)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        x = torch.nn.functional.pad(torch.cat(list(parts)), (0, PADDING))
        return torch.where(segments.mask_T, x, math.nan)

    def field(name: str) -> Tensor:
        return joined([getattr(s, name) for s in batch])

    return Tokens.of(joined(leaves), field("old"), field("mu"), field("advantages"), segments, totals, reference_logp_T=field("reference"))


def evaluate(ours: Stack, batch: Sequence[Seq]) -> Outcome:
    """Runs the pre-pass and the loss as the loop would."""
    leaves = [s.logp.clone().requires_grad_() for s in batch]
    totals = ours.statistics(pack(batch, leaves)) if ours.has_statistics else None
    answer = ours.evaluate(pack(batch, leaves, totals), denominators(batch))
    grads = torch.autograd.grad(answer.loss, leaves)
    metrics = {name: float(top / below) for name, (top, below) in answer.metrics.items()}
    return Outcome(float(answer.loss.detach()), list(grads), metrics)
