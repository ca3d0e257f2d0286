"""What each method would do to a batch: which tokens and sequences it keeps, and the effective size of what its weights leave.

Every objective is read through its gradient: on token t it pulls with c_t A_t grad log theta_t, and c_t is its weight there, 0 where it
clips or masks. A correction's weight is its weight where it keeps, else 0. All methods run at their defaults, alone.

    effective share    (sum |c|)^2 / (n sum c^2): 1 where all tokens count alike, 1/n where one counts for all
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..methods.catalog import METHODS
from ..methods.objective import Correction, Method, Need, Tokens
from ..methods.segments import LocalSegments
from ..methods.stack import Part
from ..methods.uniform import token_uniforms
from .records import Rescored, Sampled, TokenBatch

KINDS = ("objective", "correction", "vocabulary")
AVAILABLE: frozenset[Need] = frozenset({"old", "recomputed_old", "uniform", "turns"})
"""What a measurement holds for a method."""
WITHOUT_ADVANTAGE = frozenset({"nll"})
"""Objectives that weight by no advantage, so that they have no weight to show."""


def table(sample: Sampled, theta: Rescored, old: Rescored) -> list[dict[str, Any]]:
    """One row a method: kept_tokens, kept_sequences, mean_weight, max_weight, effective_tokens, effective_sequences.

    A method that needs what a measurement does not hold gets a row with `missing` and no numbers.

    Args:
        theta, old: the current policy and the one at the start of the step, on the same routes.
    """
    rows = []
    for name, method in METHODS.items():
        if method.kind not in KINDS or name in WITHOUT_ADVANTAGE:
            continue
        part = Part(method, method.config())
        row: dict[str, Any] = {"method": name, "kind": method.kind, "unit": method.unit, "evidence": method.evidence}
        tokens = _tokens(sample.batch, theta, old)
        missing = sorted(part.needs - AVAILABLE - ({"router_shift"} if tokens.router_shift_T is not None else set()))
        rows.append(row | ({"missing": missing} if missing else _effect(part, tokens)))
    return rows


def _tokens(batch: TokenBatch, theta: Rescored, old: Rescored) -> Tokens:
    """The batch as methods see it, in fp64, with theta's log-probs as a leaf of autograd."""
    sequence_T, mask_T = torch.from_numpy(batch.sequence_T), torch.from_numpy(batch.mask_T)
    segments = LocalSegments(sequence_T, mask_T, batch.trajectories, torch.from_numpy(batch.turn_T).long())
    position_T = torch.arange(len(mask_T)) - torch.from_numpy(batch.offsets_S)[sequence_T]
    return Tokens.of(
        logp_T=torch.from_numpy(theta.logp_T).double().requires_grad_(),
        old_logp_T=torch.from_numpy(old.logp_T).double(),
        behaviour_logp_T=torch.from_numpy(batch.mu_T).double(),
        advantages_T=torch.from_numpy(batch.advantage_S).double()[sequence_T],
        segments=segments,
        uniform_T=token_uniforms(sequence_T, position_T, 0),
        router_shift_T=_router_shift(theta, old),
    )


def _router_shift(theta: Rescored, old: Rescored) -> Tensor | None:
    """[T] how far the routers moved since the start of the step; nothing where theta is that start; None for a dense model."""
    if theta.condition == old.condition and theta.routes_TLK is not None:
        return torch.zeros(len(theta.logp_T), dtype=torch.float64)
    return None if theta.shift_T is None else torch.from_numpy(theta.shift_T).double()


def _effect(part: Part, tokens: Tokens) -> dict[str, Any]:
    weight_T, counted_T = _weights(part.method, part.config, tokens)
    if not bool(counted_T.any()):
        return {"missing": ["advantages that are not 0"]}
    weight_M = weight_T[counted_T]
    sequence_S = tokens.segments.sum(torch.where(counted_T, weight_T, 0.0)) / tokens.segments.sum(counted_T.double()).clamp(min=1)
    judged_S = tokens.segments.sum(counted_T.double()) > 0
    dropped_S = tokens.segments.sum((counted_T & (weight_T == 0)).double()) > 0
    return {
        "kept_tokens": float((weight_M != 0).double().mean()),
        "kept_sequences": float((~dropped_S[judged_S]).double().mean()),
        "mean_weight": float(weight_M.mean()),
        "max_weight": float(weight_M.abs().max()),
        "effective_tokens": effective_share(weight_M),
        "effective_sequences": effective_share(sequence_S[judged_S]),
    }


def effective_share(weight: Tensor) -> float:
    """(sum |w|)^2 / (n sum w^2); 0 where every weight is."""
    square = float(weight.double().square().sum())
    return float(weight.double().abs().sum()) ** 2 / (weight.numel() * square) if square > 0 else 0.0


def _weights(method: Method, config: Any, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """([T] the method's weight, [T] whether the token shows it: a loss token, whose advantage an objective can pull with)."""
    assert method.apply is not None
    totals = {} if method.statistics is None else {k: v.detach() for k, v in method.statistics(tokens, config).items()}
    answer = method.apply(dataclasses.replace(tokens, totals=totals), config)
    if isinstance(answer, Correction):
        return torch.where(answer.keep_T & tokens.mask_T, answer.weight_T.detach().double(), 0.0), tokens.mask_T
    counted_T = tokens.mask_T & (tokens.advantages_T != 0)
    (slope_T,) = torch.autograd.grad(torch.where(tokens.mask_T, answer.loss_T, 0.0).sum(), tokens.logp_T)
    return torch.where(counted_T, -slope_T / torch.where(counted_T, tokens.advantages_T, 1.0), 0.0), counted_T
