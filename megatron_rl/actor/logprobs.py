"""What the last stage knows of every token, from vocabulary shards, in chunks, fused with the output projection.

The `[T, V]` logits never exist, forward or backward: a chunk of positions is projected, reduced over the tensor-parallel group and
overwritten by the next; the backward pass projects it again and turns it into its own gradient in place. Temperature and support act
before the softmax, sums are fp32. See papers.md 10, 13.1, 13.2 and `vocabulary.py` for the legend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .vocabulary import Projection, Support, VocabShard, merge_keys, rank_keys


@dataclass(frozen=True)
class VocabStats:
    """Of every position's tempered and, with a `Support`, restricted distribution. Natural logarithms; fp32 (fp64 for fp64 inputs)."""

    logp_T: Tensor
    """Log-prob of the label; differentiable. Where the label is outside and not forced: as if it were forced, with gradient exactly 0."""
    entropy_T: Tensor | None
    """Nats, differentiable; None unless asked for."""
    kept_mass_T: Tensor | None
    """Unrestricted probability of the support (a forced label included), so that logp_T = unrestricted log-prob - log kept_mass_T."""
    inside_T: Tensor | None
    """bool: the label belonged to the support before it was forced."""
    at_ids_TJ: Tensor | None
    """Log-probs of ids_TJ, detached; -inf outside the support and for ids that do not exist (negative ones)."""
    top_ids_TK: Tensor | None
    """int64 ids of the likeliest, descending; of equal values the smaller id first. -1 where the support is smaller than K."""
    top_logp_TK: Tensor | None
    """Their log-probs, detached, from fp32 logits; -inf where the id is -1."""


_KEPT_ROW, _WEIGHTED_ROW, _LABEL_ROW, _INSIDE_ROW, _WHOLE_ROW, _IDS_ROW = range(6)
"""What is summed over the ranks: sum exp z and sum z exp z on the support; z of the label; whether that is inside; sum exp z of everything;
then z of ids_TJ. z is less the support's maximum, but less everything's in the whole sum."""


@dataclass(frozen=True)
class _Request:
    shard: VocabShard
    temperature: float
    chunk: int
    entropy: bool
    support: Support | None
    ids_TJ: Tensor | None
    top_k: int


def vocabulary_stats(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
    support: Support | None = None,
    ids_TJ: Tensor | None = None,
    top_k: int = 0,
) -> VocabStats:
    """Statistics of each position's next-token distribution. A chunk takes two collectives, three with top_k.

    Args:
        hidden_TH: the last layer's output, any float dtype; every rank of the group holds all T positions.
        weight_VH: this rank's rows of the output projection, padding included. The product has the dtype both promote to.
        labels_T: int64 global token ids below `shard.true_size`.
        temperature: logits are divided by it; above 0.
        chunk: positions projected at once: sets the memory taken, C x V in the dtype of the product.
        ids_TJ: int64 global ids whose log-probs are wanted.
        top_k: how many of the likeliest tokens are wanted.

    The gradient of hidden_TH is this rank's partial one: the caller's mapping sums it over the group. The gradient of weight_VH is
    summed in fp32 and exactly 0 in padded rows, and in rows that no position's support holds.
    """
    request = _Request(shard, temperature, chunk, entropy, support, ids_TJ, top_k)
    return VocabStats(*_ChunkedStats.apply(hidden_TH, weight_VH, labels_T, request))


@torch.no_grad()
def best_tokens(hidden_SH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """int64 [S] global id of the largest logit; the smallest id where several are equal."""
    projection = Projection(hidden_SH, weight_VH, shard, 1.0, hidden_SH.shape[0])
    logits_SV = projection.logits(slice(0, hidden_SH.shape[0]))
    return merge_keys(rank_keys(logits_SV, 1, shard), shard)[0].squeeze(1)


class _ChunkedStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, request: _Request) -> tuple[Tensor | None, ...]:
        projection = Projection(hidden_TH, weight_VH, request.shard, request.temperature, request.chunk)
        chunks = [_chunk_stats(projection, part, labels_T, request) for part in projection.chunks()]
        if not chunks:  # no position: the outputs keep their shapes
            chunks = [_chunk_stats(projection, slice(0, 0), labels_T, request)]
        top_T, log_z_T, *outputs = (None if x[0] is None else torch.cat(x) for x in zip(*chunks, strict=True))
        _, entropy_T, _, inside_T, *_ = outputs
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, top_T, log_z_T, entropy_T, inside_T)
        ctx.request = request
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in outputs[2:] if x is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_T, top_T, log_z_T, entropy_T, inside_T = ctx.saved_tensors
        request: _Request = ctx.request
        projection = Projection(hidden_TH, weight_VH, request.shard, request.temperature, request.chunk)
        grad_logp_T = torch.zeros_like(log_z_T) if grads[0] is None else grads[0].to(log_z_T.dtype)
        if request.support is not None and not request.support.force_label:
            grad_logp_T = torch.where(inside_T, grad_logp_T, 0.0)
        # d logp / d z = onehot - p ;  d entropy / d z = -p (log p + entropy) ;  so  d / d z = onehot g - p (offset + slope log p)
        slope_T = None if entropy_T is None or grads[1] is None else grads[1].to(log_z_T.dtype)
        offset_T = grad_logp_T if slope_T is None else torch.addcmul(grad_logp_T, slope_T, entropy_T)
        wanted = ctx.needs_input_grad
        grad_hidden_TH = torch.empty_like(hidden_TH) if wanted[0] else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=projection.sum_dtype) if wanted[1] else None
        for part in projection.chunks():
            grad_CV = projection.logits(part)
            for rows, at in projection.tiles(part):
                tile_RV = projection.tempered(grad_CV[rows])
                keep_RV = _support(tile_RV, top_T[at], labels_T[at], at, request)
                _to_gradient(tile_RV.sub_(log_z_T[at, None]), keep_RV, offset_T[at], None if slope_T is None else slope_T[at])
                _add_at_labels(tile_RV, labels_T[at], grad_logp_T[at], request.shard)
                if request.temperature != 1.0:
                    tile_RV.div_(request.temperature)
                if tile_RV.dtype != grad_CV.dtype:
                    grad_CV[rows] = tile_RV
            projection.add_gradients(part, grad_CV, grad_hidden_TH, grad_weight_VH)
        return (
            grad_hidden_TH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None,
            None,
        )


def _support(z_RV: Tensor, top_R: Tensor, labels_R: Tensor, at: slice, request: _Request) -> Tensor | None:
    """bool [R, V] of the restricted distribution, forced labels included; None if it is not restricted."""
    if request.support is None:
        return None
    return request.support.with_label(request.support.members(z_RV, top_R, at, request.shard), labels_R, request.shard)


def _to_gradient(log_p_RV: Tensor, keep_RV: Tensor | None, offset_R: Tensor, slope_R: Tensor | None) -> None:
    """In place: log p becomes -p (offset + slope log p), exactly 0 outside the support."""
    factor_RV = None if slope_R is None else torch.addcmul(offset_R[:, None], log_p_RV, slope_R[:, None])
    log_p_RV.exp_()
    if keep_RV is not None:
        log_p_RV.masked_fill_(~keep_RV, 0.0)
    log_p_RV.mul_(offset_R[:, None] if factor_RV is None else factor_RV).neg_()


def _add_at_labels(x_RV: Tensor, labels_R: Tensor, amount_R: Tensor, shard: VocabShard) -> None:
    if x_RV.shape[1] > 0:
        own_R, column_R = shard.own(labels_R, x_RV.shape[1])
        x_RV.scatter_add_(1, column_R[:, None], torch.where(own_R, amount_R, 0.0)[:, None])


def _chunk_stats(projection: Projection, part: slice, labels_T: Tensor, request: _Request) -> tuple[Any, ...]:
    """(maxima, log normalisers, then the fields of VocabStats) of one chunk."""
    support, shard = request.support, request.shard
    logits_CV = projection.logits(part)
    top_C, shift_C = _shifts(projection, logits_CV, part, labels_T[part], request)
    rows_of_sums = _IDS_ROW + (0 if request.ids_TJ is None else request.ids_TJ.shape[1])
    sums_SC = torch.zeros(rows_of_sums, logits_CV.shape[0], dtype=projection.sum_dtype, device=logits_CV.device)
    keys_CK = torch.empty(logits_CV.shape[0], request.top_k, dtype=torch.int64, device=logits_CV.device)
    for rows, at in projection.tiles(part):
        z_RV, labels_R, keep_RV = projection.tempered(logits_CV[rows]), labels_T[at], None
        if support is not None:
            keep_RV = support.members(z_RV, top_C[rows], at, shard)
            sums_SC[_INSIDE_ROW, rows] = shard.look_up(keep_RV, labels_R[:, None], False).squeeze(1).to(sums_SC.dtype)
            keep_RV = support.with_label(keep_RV, labels_R, shard)
        if request.top_k:
            ranked_RV = z_RV if keep_RV is None else z_RV.masked_fill(~keep_RV, -torch.inf)
            keys_CK[rows] = rank_keys(ranked_RV, request.top_k, shard)
        _tile_sums(sums_SC[:, rows], z_RV.sub_(shift_C[rows, None]), keep_RV, shift_C[rows] - top_C[rows], labels_R, at, request)
    log_z_C, *stats = _finish(shard.reduce(sums_SC, dist.ReduceOp.SUM), top_C, shift_C, part, request)
    if not request.top_k:
        return top_C, log_z_C, *stats, None, None
    top_ids_CK, top_z_CK = merge_keys(keys_CK, shard)
    return top_C, log_z_C, *stats, top_ids_CK, top_z_CK - log_z_C[:, None]


def _shifts(projection: Projection, logits_CV: Tensor, part: slice, labels_C: Tensor, request: _Request) -> tuple[Tensor, Tensor]:
    """[C] maxima over all ranks: of everything, and of the support, so that its sum neither overflows nor vanishes. One collective."""
    top_C, support = projection.top(logits_CV), request.support
    if support is None or support.keep_TK is None:  # the likeliest token is always a member
        top_C = request.shard.reduce(top_C, dist.ReduceOp.MAX)
        return top_C, top_C
    ids_CK = support.keep_TK[part]
    label_C = labels_C if support.force_label else torch.full_like(labels_C, -1)
    named_CK = torch.cat([ids_CK, label_C[:, None]], dim=1)
    kept_C = projection.tempered(request.shard.look_up(logits_CV, named_CK, -torch.inf).amax(dim=1))
    kept_C = torch.where((ids_CK < 0).all(dim=1), top_C, kept_C)
    top_C, shift_C = request.shard.reduce(torch.stack([top_C, kept_C]), dist.ReduceOp.MAX)
    return top_C, shift_C


def _tile_sums(
    sums_SR: Tensor, z_RV: Tensor, keep_RV: Tensor | None, below_top_R: Tensor, labels_R: Tensor, at: slice, request: _Request
) -> None:
    """Fills this rank's sums of one tile. Overwrites z_RV: tempered logits less their shift; below_top_R: the shift less the maximum."""
    shard, support = request.shard, request.support
    sums_SR[_LABEL_ROW] = shard.look_up(z_RV, labels_R[:, None], 0.0).squeeze(1)
    if request.ids_TJ is not None:
        at_RJ = shard.look_up(z_RV, request.ids_TJ[at], 0.0)
        if keep_RV is not None:
            at_RJ = torch.where(shard.look_up(keep_RV, request.ids_TJ[at], True), at_RJ, -torch.inf)
        sums_SR[_IDS_ROW:] = at_RJ.T
    if support is not None and support.keep_TK is not None:
        sums_SR[_WHOLE_ROW] = (z_RV + below_top_R[:, None]).exp_().sum(dim=1)
    exp_RV = z_RV.exp() if request.entropy else z_RV.exp_()
    if support is not None and support.keep_TK is None:
        sums_SR[_WHOLE_ROW] = exp_RV.sum(dim=1)
    if keep_RV is not None:
        exp_RV.masked_fill_(~keep_RV, 0.0)
    sums_SR[_KEPT_ROW] = exp_RV.sum(dim=1)
    if request.entropy:
        sums_SR[_WEIGHTED_ROW] = exp_RV.mul_(z_RV).sum(dim=1)


def _finish(sums_SC: Tensor, top_C: Tensor, shift_C: Tensor, part: slice, request: _Request) -> tuple[Any, ...]:
    """(log normalisers, logp, entropy, kept mass, inside, log-probs at ids) from sums over all ranks."""
    kept_C, weighted_C, logit_C, inside_C, whole_C = sums_SC[:_IDS_ROW]
    log_kept_C = kept_C.log()
    logp_C = logit_C - log_kept_C
    entropy_C = log_kept_C - weighted_C / kept_C if request.entropy else None
    mass_C = member_C = at_CJ = None
    if request.support is not None:
        member_C = inside_C > 0
        mass_C = (log_kept_C - whole_C.log() + (shift_C - top_C)).exp().clamp(max=1.0)
        if not request.support.force_label:
            logp_C = torch.where(member_C, logp_C, logit_C - torch.logaddexp(log_kept_C, logit_C))
    if request.ids_TJ is not None:
        ids_CJ = request.ids_TJ[part]
        exists_CJ = (ids_CJ >= 0) & (ids_CJ < request.shard.true_size)
        at_CJ = torch.where(exists_CJ, sums_SC[_IDS_ROW:].T - log_kept_C[:, None], -torch.inf)
    return shift_C + log_kept_C, logp_C, entropy_C, mass_C, member_C, at_CJ
