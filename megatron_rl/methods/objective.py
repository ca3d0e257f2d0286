"""The one contract of all methods: what they return, and how it becomes a loss. `tokens.py` says what they are given.

    loss = sum_t  ( weight_t * keep_t * surrogate_t  +  penalty_t )  /  global denominator

An *objective* returns surrogate_t (to be minimised; it carries the gradient). *Corrections* return detached weights and masks that
stack on any objective. *Penalties* are added to the loss of every loss token, masked or not. None sees a process group: sums over
sequences and turns go through `Segments`, sums over the whole mini-batch arrive as `totals`, and denominators are counted before the
first forward, over every rank and micro-batch.

Legend: T positions, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..types import Metric
from .segments import Segments
from .tokens import LOG_RATIO_LIMIT, Pair, Tokens, TopK, ratio, straight_through

__all__ = [
    "LOG_RATIO_LIMIT", "Aggregation", "Correction", "Denominators", "Kind", "Method", "Need", "Pair", "Surrogate", "Tokens", "TopK",
    "ratio", "reduce_loss", "straight_through",
]  # fmt: skip

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Kind = Literal["objective", "correction", "penalty", "vocabulary", "advantage", "data", "step", "schedule"]
Need = Literal[
    "old", "recomputed_old", "turns", "behaviour_top_k", "old_top_k", "uniform", "router_shift", "reference", "min_p_sampling", "keep_sets"
]
"""old: log-probs to take ratios over; the engine's may stand in. recomputed_old: the trainer's own at the start of the step, as a method
that compares old with mu or was told to look at old needs them. turns: turn ids in the segments. min_p_sampling: an engine that truncates
as the method does. keep_sets: the ids a truncated sampler could choose. The others are optional fields of `Tokens`."""
WHOLE_VOCABULARY = 0
"""A top-K that leaves nothing out, so that a partition is the distribution itself."""
Evidence = Literal["F", "C", "D", "A", "I", "N"]
Unit = Literal["token", "prefix", "turn", "sequence", "step", "vocabulary", "layer"]


@dataclass(frozen=True)
class Surrogate:
    """An objective's or a penalty's answer: the loss of each position (sign included) and its metrics."""

    loss_T: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    clipped_loss_T: Tensor | None = None
    """The part of the unclipped loss that the clip took away, so that the gradients of loss_T and clipped_loss_T add up to the
    unclipped one (SORL). Its gradient norm needs a second backward."""


@dataclass(frozen=True)
class Correction:
    """A correction's answer: a detached weight [T] >= 0 and a detached mask [T]."""

    weight_T: Tensor
    keep_T: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @staticmethod
    def mask(keep_T: Tensor, tokens: Tokens, metrics: Mapping[str, Metric] | None = None) -> Correction:
        """A mask without a weight; logs the share of loss tokens it keeps."""
        return Correction(torch.ones_like(tokens.advantages_T), keep_T, {"kept_share": tokens.share(keep_T), **(metrics or {})})


@dataclass(frozen=True)
class Method:
    """One published method, as its file declares it."""

    name: str
    kind: Kind
    config: type
    """A frozen dataclass; each field has a default and, in its docstring, a unit."""
    apply: Callable[[Tokens, Any], Any] | None
    """(Tokens, config) -> Surrogate for an objective or penalty, Correction for a correction or a vocabulary restriction; None for the
    other kinds, whose functions the loop calls by name."""
    paper: str
    evidence: str
    """The tags of papers.md: F full text, C code, D secondary, A abstract, I inferred, N not located."""
    unit: Unit
    summary: str
    aggregation: Aggregation = "token-mean"
    """The paper's reduction; `objective.aggregation` in the configuration overrides it."""
    needs: Callable[[Any], frozenset[Need]] | frozenset[Need] = frozenset()
    """What the forward passes and the rollout must provide; a function of the config where that depends on its switches."""
    statistics: Callable[[Tokens, Any], Mapping[str, Tensor]] | None = None
    """(Tokens, config) -> additive statistics of one micro-batch. They are summed over the mini-batch and all ranks in a pre-pass,
    and come back as `Tokens.totals`, so that no result depends on the micro-batch or the parallel layout."""
    candidates: Callable[[Any], int] | None = None
    """For methods that need a top-K: config -> K; `WHOLE_VOCABULARY` for all tokens."""
    gradient_divisor: Callable[[float, Any], float] | None = None
    """(norm of the gradient of clipped_loss, config) -> what the step's gradient is divided by; only SORL has one."""


def pair_needs(pair: Pair) -> frozenset[Need]:
    """Whether a ratio makes the forward at the start of the step necessary."""
    return frozenset({"recomputed_old"}) if "old" in pair else frozenset()


@dataclass(frozen=True)
class Denominators:
    """Global counts over the mini-batch: every data-parallel rank, every micro-batch, before any method mask."""

    tokens: float
    """Loss tokens."""
    sequences: float
    """Sequences with at least one loss token."""
    max_tokens: float
    """The constant of seq-mean-token-sum-norm, usually rollout.max_new_tokens."""


def reduce_loss(loss_T: Tensor, segments: Segments, aggregation: Aggregation, over: Denominators) -> Tensor:
    """The share of the loss that these positions contribute (papers.md section 1.5).

    The sum of the shares over all micro-batches and over all ranks, context-parallel ones included, is the loss: only this rank's
    positions are added up here, so no gradient has to pass through a collective. No loss tokens give exactly 0 with a zero gradient.
    """
    loss_T = torch.where(segments.mask_T, loss_T, 0.0)
    if aggregation == "token-mean":
        return loss_T.sum() / max(over.tokens, 1.0)
    if aggregation == "seq-mean-token-mean":
        count_T = segments.spread(segments.count()).clamp(min=1).to(loss_T.dtype)
        return (loss_T / count_T).sum() / max(over.sequences, 1.0)
    if aggregation == "seq-mean-token-sum":
        return loss_T.sum() / max(over.sequences, 1.0)
    if aggregation == "seq-mean-token-sum-norm":
        return loss_T.sum() / (max(over.sequences, 1.0) * over.max_tokens)
    raise ValueError(
        f"objective.aggregation: {aggregation!r} is unknown; use token-mean, seq-mean-token-mean, seq-mean-token-sum or "
        "seq-mean-token-sum-norm"
    )
