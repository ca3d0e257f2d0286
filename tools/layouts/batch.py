"""A ragged batch made from a seed: what a rollout would have returned, with everything that some method asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_rl.types import Batch, Candidates, Prompt, Trajectory

LENGTHS = (5, 9, 17, 12, 30, 3, 8)
"""Tokens of each trajectory. Those of 3 carry loss at one token."""
SPREAD = 0.3
"""Standard deviation of the behaviour policy's logits: of the order of the tiny model's own, so that ratios lie around 1."""


def make_batch(
    vocab: int,
    layers: int,
    experts: int,
    k: int,
    seed: int = 0,
    *,
    lengths: Sequence[int] = LENGTHS,
    silent: int = 0,
    candidates: int = 0,
    keep: int = 0,
) -> Batch:
    """Trajectories with two turns around a tool's answer, random routes, and NaN outside the loss mask.

    Args:
        k: experts a token.
        silent: how many trajectories, the last ones, carry no loss at all.
        candidates: how many of the behaviour policy's likeliest tokens come along.
        keep: most tokens that the sampler could choose from; 0 for all. behaviour_logp is then of the renormalised distribution.
    """
    rng = np.random.default_rng(seed)
    trajectories, advantages = [], []
    for i, n in enumerate(lengths):
        mask = _loss_mask(n) if i < len(lengths) - silent else np.zeros(n, dtype=bool)
        turns = np.where(mask, (np.arange(n) > n // 2).astype(np.int32), -1).astype(np.int32)
        logp_NV = _log_softmax(rng.normal(0, SPREAD, (n, vocab)))
        order_NV = np.argsort(-logp_NV, axis=1).astype(np.int32)
        likely = order_NV[np.arange(n), rng.integers(0, 4, n)]
        drawn = np.where(rng.random(n) < 0.5, likely, rng.integers(0, vocab, n))
        # Id 0 is the pad token. Its embedding is 0, where RMSNorm's gradient is a thousand times any other token's.
        tokens = np.maximum(drawn, 1).astype(np.int32)
        logp, keep_ids = logp_NV[np.arange(n), tokens], None
        if keep:
            keep_ids = _keep_ids(order_NV, tokens, mask, keep, rng)
            kept = np.where(keep_ids >= 0, np.take_along_axis(logp_NV, np.maximum(keep_ids, 0), axis=1), -np.inf)
            logp = np.where(mask, logp - np.log(np.where(mask, np.exp(kept).sum(1), 1.0)), 0.0)
        routes = np.argsort(rng.random((n - 1, layers, experts)), axis=-1)[..., :k].astype(np.uint8)
        trajectories.append(
            Trajectory(
                prompt=Prompt(id=str(i), tokens=np.zeros(1, np.int32), text="", answer=""),
                group=str(i // 2),
                tokens=tokens,
                loss_mask=mask,
                behaviour_logp=np.where(mask, logp, np.nan).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=turns,
                routes=routes,
                finish_reason="stop",
                text="",
                reward=0.0,
                candidates=_candidates(order_NV[:, :candidates], logp_NV, mask) if candidates else None,
                keep_ids=keep_ids,
            )
        )
        advantages.append(np.where(mask, rng.normal(), 0.0).astype(np.float32))
    return Batch(tuple(trajectories), tuple(advantages))


def _loss_mask(n: int) -> NDArray[np.bool_]:
    mask = np.zeros(n, dtype=bool)
    mask[n // 3 : n // 2] = True
    mask[n // 2 + 1 :] = True
    mask[0] = False
    return mask


def _log_softmax(z_NV: NDArray[np.float64]) -> NDArray[np.float64]:
    return z_NV - np.log(np.exp(z_NV).sum(axis=1, keepdims=True))


def _candidates(ids_NK: NDArray[np.int32], logp_NV: NDArray[np.float64], mask: NDArray[np.bool_]) -> Candidates:
    logp_NK = np.take_along_axis(logp_NV, ids_NK, axis=1)
    return Candidates(
        ids=np.where(mask[:, None], ids_NK, -1).astype(np.int32), logp=np.where(mask[:, None], logp_NK, -np.inf).astype(np.float32)
    )


def _keep_ids(
    order_NV: NDArray[np.int32], tokens: NDArray[np.int32], mask: NDArray[np.bool_], keep: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """[N, keep] the sampled token, and between 2 and keep - 1 others."""
    out = np.full((len(tokens), keep), -1, dtype=np.int32)
    for n in np.flatnonzero(mask):
        others = [t for t in order_NV[n, :keep] if t != tokens[n]][: rng.integers(2, keep)]
        out[n, : len(others) + 1] = [tokens[n], *others]
    return out
