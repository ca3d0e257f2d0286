"""Log-probs and entropies from vocabulary shards, in chunks, fused with the output projection.

The `[T, V]` logits never exist: a chunk of positions is projected, reduced over the tensor-parallel group and dropped; the backward
pass projects it again. Temperature is applied before the softmax and padded vocabulary columns are masked before any maximum or sum.

Legend: T positions, C positions of one chunk, H hidden, V vocabulary columns of this rank (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds, and with whom it shares the rest."""

    start: int
    """Global id of this rank's first column."""
    true_size: int
    """Vocabulary without padding; columns at or beyond it do not exist."""
    group: dist.ProcessGroup | None
    """The tensor-parallel group; None for one process."""

    def reduce(self, x: Tensor, op: Any) -> Tensor:
        """In place over the group."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, shard: VocabShard, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, in nats, fp32 [T] each, both differentiable.

    Args:
        hidden_TH: the last layer's output, any float dtype; every rank of the group holds all T positions.
        weight_VH: this rank's rows of the output projection, same dtype.
        labels_T: int64 global token ids below `shard.true_size`.
        temperature: logits are divided by it.
        chunk: positions projected at once.

    The gradient of hidden_TH is this rank's partial one: the caller's mapping sums it over the group. The gradient of weight_VH is
    exactly 0 in padded rows.
    """
    logp_T, entropy_T = _ChunkedLogProb.apply(hidden_TH, weight_VH, labels_T, shard, temperature, chunk)
    return logp_T, entropy_T


@torch.no_grad()
def best_tokens(hidden_SH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """int64 [S] global id of the largest logit; the smallest id where several are equal."""
    value_S, column_S = _logits(hidden_SH, weight_VH, shard, 1.0).max(dim=-1)
    best_S = shard.reduce(value_S.clone(), dist.ReduceOp.MAX)
    candidate_S = torch.where(value_S == best_S, column_S + shard.start, torch.iinfo(torch.int64).max)
    return shard.reduce(candidate_S, dist.ReduceOp.MIN)


class _ChunkedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, shard: VocabShard, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        outputs = [
            _chunk_forward(h_CH, weight_VH, l_C, shard, temperature)
            for h_CH, l_C in zip(hidden_TH.split(chunk), labels_T.split(chunk), strict=True)
        ]
        logp_T, entropy_T, log_z_T = (torch.cat(x) for x in zip(*outputs, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, entropy_T, log_z_T)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_T, entropy_T, log_z_T = ctx.saved_tensors
        grad_logp_T, grad_entropy_T = (torch.zeros_like(entropy_T) if g is None else g.float() for g in grads)
        entropy_matters = grads[1] is not None
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for begin in range(0, hidden_TH.shape[0], ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            h_CH = hidden_TH[part]
            logits_CV = _logits(h_CH, weight_VH, ctx.shard, ctx.temperature)
            log_p_CV = logits_CV - log_z_T[part, None]
            p_CV = log_p_CV.exp()
            # d logp / d z = onehot - p ;  d entropy / d z = -p (log p + entropy)
            grad_CV = p_CV * -grad_logp_T[part, None]
            if entropy_matters:
                surprise_CV = torch.where(p_CV > 0, log_p_CV + entropy_T[part, None], 0.0)
                grad_CV -= p_CV * surprise_CV * grad_entropy_T[part, None]
            row_M, column_M = _own_labels(labels_T[part], ctx.shard, weight_VH.shape[0])
            grad_CV[row_M, column_M] += grad_logp_T[part][row_M]
            grad_CV = (grad_CV / ctx.temperature).to(weight_VH.dtype)
            grad_hidden_TH[part] = grad_CV @ weight_VH
            grad_weight_VH += (grad_CV.T @ h_CH).float()
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _logits(h_CH: Tensor, weight_VH: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """fp32 [C, V] tempered logits with -inf in the columns that do not exist."""
    logits_CV = (h_CH @ weight_VH.T).float() / temperature
    real = max(0, min(weight_VH.shape[0], shard.true_size - shard.start))
    logits_CV[:, real:] = -torch.inf
    return logits_CV


def _own_labels(labels_C: Tensor, shard: VocabShard, columns: int) -> tuple[Tensor, Tensor]:
    """(rows, local columns) of the labels that this rank holds."""
    local_C = labels_C - shard.start
    row_M = ((local_C >= 0) & (local_C < columns)).nonzero(as_tuple=True)[0]
    return row_M, local_C[row_M]


def _chunk_forward(
    h_CH: Tensor, weight_VH: Tensor, labels_C: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits_CV = _logits(h_CH, weight_VH, shard, temperature)
    top_C = shard.reduce(logits_CV.max(dim=-1).values, dist.ReduceOp.MAX)
    shifted_CV = logits_CV - top_C[:, None]
    exp_CV = shifted_CV.exp()
    row_M, column_M = _own_labels(labels_C, shard, weight_VH.shape[0])
    sums_3C = torch.zeros(3, h_CH.shape[0], dtype=torch.float32, device=h_CH.device)
    sums_3C[0] = exp_CV.sum(dim=-1)
    sums_3C[1] = torch.where(exp_CV > 0, exp_CV * shifted_CV, 0.0).sum(dim=-1)
    sums_3C[2, row_M] = shifted_CV[row_M, column_M]
    z_C, weighted_C, label_C = shard.reduce(sums_3C, dist.ReduceOp.SUM)
    log_z_C = z_C.log()
    return label_C - log_z_C, log_z_C - weighted_C / z_C, top_C + log_z_C
