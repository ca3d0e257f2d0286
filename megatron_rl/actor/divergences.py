"""Exact divergences of two policies over the whole vocabulary, from vocabulary shards, in chunks (papers.md 1.4, 13.2)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .vocabulary import Projection, VocabShard


@torch.no_grad()
def exact_divergences(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    other_hidden_TH: Tensor,
    other_weight_VH: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(KL(other || this) in nats, total variation), fp32 [T], detached; three collectives a chunk.

    Args:
        hidden_TH, weight_VH: this policy's last hidden states and output projection, as in `vocabulary_stats`.
        other_hidden_TH, other_weight_VH: the other's, behaviour or old; hidden size and dtype may differ, the shard is the same.
        chunk: positions projected at once: two buffers of C x V are taken.
    """
    this = Projection(hidden_TH, weight_VH, shard, temperature, chunk)
    other = Projection(other_hidden_TH, other_weight_VH, shard, temperature, chunk)
    out_2T = torch.zeros(2, hidden_TH.shape[0], dtype=torch.promote_types(this.sum_dtype, other.sum_dtype), device=hidden_TH.device)
    for part in this.chunks():
        logits = (this.logits(part), other.logits(part))
        log_z_2C = _log_normalisers((this, other), logits, part, shard)
        for rows, at in this.tiles(part):
            p_RV, q_RV = (
                projection.tempered(x_CV[rows]).sub_(log_z_C[rows, None])
                for projection, x_CV, log_z_C in zip((this, other), logits, log_z_2C, strict=True)
            )
            out_2T[:, at] = _local_divergences(p_RV, q_RV)
    kl_T, tv_T = shard.reduce(out_2T, dist.ReduceOp.SUM)
    return kl_T, tv_T


def _log_normalisers(projections: tuple[Projection, Projection], logits: tuple[Tensor, Tensor], part: slice, shard: VocabShard) -> Tensor:
    """[2, C] log sum exp over all ranks. Leaves the logits alone."""
    top_2C = torch.stack([projection.top(x_CV) for projection, x_CV in zip(projections, logits, strict=True)])
    shard.reduce(top_2C, dist.ReduceOp.MAX)
    sums_2C = torch.zeros_like(top_2C)
    for rows, _ in projections[0].tiles(part):
        for i, (projection, x_CV) in enumerate(zip(projections, logits, strict=True)):
            sums_2C[i, rows] = projection.tempered(x_CV[rows].clone()).sub_(top_2C[i, rows, None]).exp_().sum(dim=1)
    return top_2C + shard.reduce(sums_2C, dist.ReduceOp.SUM).log()


def _local_divergences(log_p_RV: Tensor, log_q_RV: Tensor) -> Tensor:
    """[2, R] this rank's columns of (KL(q || p), TV(q, p)).

    As q (e^d - 1 - d) with d = log p - log q the KL has no cancellation: every term is >= 0, and rounding of the logits counts squared.
    """
    d_RV, q_RV = log_p_RV - log_q_RV, log_q_RV.exp()
    gain_RV = torch.where(d_RV < 1, q_RV * torch.expm1(d_RV), log_p_RV.exp() - q_RV)  # p - q
    return torch.stack([(gain_RV - q_RV * d_RV).sum(dim=1), gain_RV.abs().sum(dim=1) / 2])
