"""One rank's columns of the vocabulary: projecting chunks of positions onto them, restricting them, ranking them.

A chunk's logits live in one buffer of the dtype of the projection, used again for every chunk and overwritten by their gradient.
Arithmetic on them is fp32 (fp64 for fp64 inputs), a tile of rows at a time. Padded columns are never projected: nothing can count them.

Legend: T positions, C positions of one chunk, R rows of one tile, H hidden, V this rank's real vocabulary columns, K and J ids a position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_COLUMNS = 8192
"""Columns multiplied at once: bounds what is converted to the dtype of the product."""
TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Elements of one tile: small on a CPU, where fresh memory costs more than another loop; large where a kernel launch does."""


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds, and with whom it shares the rest."""

    start: int
    """Global id of this rank's first column."""
    true_size: int
    """Vocabulary without padding; columns at or beyond it do not exist."""
    group: dist.ProcessGroup | None
    """The tensor-parallel group; None for one process."""

    @property
    def size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    def reduce(self, x: Tensor, op: Any) -> Tensor:
        """In place over the group."""
        if self.size > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def real_columns(self, columns: int) -> int:
        """How many of this rank's columns are not padding."""
        return max(0, min(columns, self.true_size - self.start))

    def look_up(self, x_RV: Tensor, ids_RK: Tensor, elsewhere: float) -> Tensor:
        """[R, K] x at global ids where this rank holds them, `elsewhere` where another or none does."""
        if x_RV.shape[1] == 0:
            return torch.full(ids_RK.shape, elsewhere, dtype=x_RV.dtype, device=x_RV.device)
        own_RK, column_RK = self.own(ids_RK, x_RV.shape[1])
        return torch.where(own_RK, x_RV.gather(1, column_RK), elsewhere)

    def own(self, ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """(which ids this rank holds, their columns; 0 for the others)."""
        column = ids - self.start
        own = (column >= 0) & (column < columns)
        return own, torch.where(own, column, 0)


@dataclass(frozen=True)
class Support:
    """The part of the vocabulary a distribution is restricted to and renormalised over. Exactly one of the first two is set.

    Membership is detached: no gradient flows through it.
    """

    min_p: float | None = None
    """DVP (2512.23087): keep z >= max z + log(min_p), after the temperature. In (0, 1]."""
    keep_TK: Tensor | None = None
    """int64 [T, K] global ids shipped with the rollout, -1 where a row is shorter; a row of only -1 keeps everything."""
    force_label: bool = True
    """The label belongs to the support although it would be pruned; `VocabStats.inside_T` still counts it."""

    def __post_init__(self) -> None:
        if (self.min_p is None) == (self.keep_TK is None):
            raise ValueError("Support needs exactly one of min_p and keep_TK")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise ValueError(f"Support.min_p is {self.min_p}; it is a share of the largest probability: set it above 0 and to 1 at most")

    def members(self, z_RV: Tensor, top_R: Tensor, at: slice, shard: VocabShard) -> Tensor:
        """bool [R, V] of rows `at`, the label not yet forced. z_RV: tempered logits; top_R: their maxima over all ranks."""
        if self.keep_TK is None:
            assert self.min_p is not None
            return z_RV >= (top_R + math.log(self.min_p))[:, None]
        ids_RK = self.keep_TK[at]
        rows, columns = z_RV.shape
        own_RK, column_RK = shard.own(ids_RK, columns)
        # one column more takes the ids of other ranks
        keep = torch.zeros(rows, columns + 1, dtype=torch.bool, device=z_RV.device)
        keep.scatter_(1, torch.where(own_RK, column_RK, columns), True)
        return keep[:, :columns] | (ids_RK < 0).all(dim=1)[:, None]

    def with_label(self, keep_RV: Tensor, labels_R: Tensor, shard: VocabShard) -> Tensor:
        """The support, in place, with the labels added if they are forced."""
        if self.force_label and keep_RV.shape[1] > 0:
            own_R1, column_R1 = shard.own(labels_R[:, None], keep_RV.shape[1])
            keep_RV.scatter_(1, column_R1, keep_RV.gather(1, column_R1) | own_R1)
        return keep_RV


class Projection:
    """hidden @ weight.T / temperature on this rank's real columns, a chunk of positions at a time.

    Products have the dtype that hidden and weight promote to. A CPU forms them in fp32 and rounds once: without bf16 instructions torch
    is up to 200 times slower, and hardware that has them does the same.
    """

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard, temperature: float, chunk: int) -> None:
        self.hidden_TH, self.temperature, self.chunk = hidden_TH, temperature, chunk
        self.weight_VH = weight_VH[: shard.real_columns(weight_VH.shape[0])]
        self.dtype = torch.promote_types(hidden_TH.dtype, weight_VH.dtype)
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        self._product_dtype = self.sum_dtype if hidden_TH.device.type == "cpu" else self.dtype
        self._buffer_CV = hidden_TH.new_empty(min(chunk, hidden_TH.shape[0]), self.weight_VH.shape[0], dtype=self.dtype)

    def chunks(self) -> Iterator[slice]:
        """Of the positions."""
        for begin in range(0, self.hidden_TH.shape[0], self.chunk):
            yield slice(begin, min(begin + self.chunk, self.hidden_TH.shape[0]))

    def tiles(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """(rows of the chunk, positions) of each tile."""
        limit = TILE_ELEMENTS.get(self.hidden_TH.device.type, TILE_ELEMENTS["cuda"])
        rows = max(1, limit // max(1, self.weight_VH.shape[0]))
        for begin in range(part.start, part.stop, rows):
            end = min(begin + rows, part.stop)
            yield slice(begin - part.start, end - part.start), slice(begin, end)

    def _blocks(self) -> Iterator[slice]:
        for begin in range(0, self.weight_VH.shape[0], BLOCK_COLUMNS):
            yield slice(begin, min(begin + BLOCK_COLUMNS, self.weight_VH.shape[0]))

    def logits(self, part: slice) -> Tensor:
        """[C, V] before the temperature, in the buffer that the next call overwrites."""
        hidden_CH = self.hidden_TH[part].to(self._product_dtype)
        out_CV = self._buffer_CV[: hidden_CH.shape[0]]
        for block in self._blocks():
            weight_HB = self.weight_VH[block].to(self._product_dtype).T
            if out_CV.dtype == self._product_dtype:
                torch.mm(hidden_CH, weight_HB, out=out_CV[:, block])
            else:
                out_CV[:, block] = hidden_CH @ weight_HB
        return out_CV

    def tempered(self, x: Tensor) -> Tensor:
        """Logits as the sampler sees them, in the dtype of the sums: x itself, changed, where it has that dtype."""
        x = x.to(self.sum_dtype)
        return x if self.temperature == 1.0 else x.div_(self.temperature)

    def top(self, logits_CV: Tensor) -> Tensor:
        """[C] this rank's largest tempered logit; -inf without columns. Division by a positive number keeps the order."""
        if logits_CV.shape[1] == 0:
            return torch.full(logits_CV.shape[:1], -torch.inf, dtype=self.sum_dtype, device=logits_CV.device)
        return self.tempered(logits_CV.amax(dim=1))

    def add_gradients(self, part: slice, grad_CV: Tensor, grad_hidden_TH: Tensor | None, grad_weight_VH: Tensor | None) -> None:
        """From the gradient of a chunk's `logits`: sets that chunk of the one, adds to the other, which is in the dtype of the sums."""
        hidden_CH = self.hidden_TH[part].to(self._product_dtype)
        total_CH = torch.zeros_like(hidden_CH, dtype=self.sum_dtype)
        for block in self._blocks():
            grad_CB = grad_CV[:, block].to(self._product_dtype)
            if grad_hidden_TH is not None:
                _add_product(total_CH, grad_CB, self.weight_VH[block].to(self._product_dtype))
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH[block], grad_CB.T, hidden_CH)
        if grad_hidden_TH is not None:
            grad_hidden_TH[part] = total_CH


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of total: a product rounded to bf16 before the sum would bias training."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # low precision, on an accelerator
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def rank_keys(z_RV: Tensor, k: int, shard: VocabShard) -> Tensor:
    """int64 [R, k] keys of this rank's likeliest tokens, in no order: a larger value is a larger key; of equal values, the smaller id."""
    if z_RV.shape[1] < k:
        z_RV = torch.nn.functional.pad(z_RV, (0, k - z_RV.shape[1]), value=-torch.inf)
    bits_RV = (z_RV.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    # the bits of a negative float fall as it rises
    key_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).long() << 32
    key_RV += _LAST_ID - shard.start - torch.arange(z_RV.shape[1], device=z_RV.device)
    return key_RV.topk(k, dim=1, sorted=False).values


def merge_keys(keys_CK: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The likeliest over all ranks, descending: (int64 [C, K] ids, fp32 [C, K] values), -1 and -inf where fewer; one collective."""
    k = keys_CK.shape[1]
    if shard.size > 1:
        every = keys_CK.new_empty(shard.size * keys_CK.shape[0], k)
        dist.all_gather_into_tensor(every, keys_CK.contiguous(), group=shard.group)
        keys_CK = every.view(shard.size, -1, k).transpose(0, 1).flatten(1)
    keys_CK = keys_CK.topk(k, dim=1).values
    high_CK = (keys_CK >> 32).int()
    value_CK = (high_CK ^ ((high_CK >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(value_CK > -torch.inf, _LAST_ID - (keys_CK & _LAST_ID), -1), value_CK


_LAST_ID = 2**32 - 1
