"""Run on 4 forked ranks: every operation of `Segments` over shards against `LocalSegments` over the whole pack, cp 1, 2 and 4.

usage: segments.py OUT.json; rank 0 writes {cp: {operation: [largest difference of values, of gradients]}} over random packs, over all
ranks, and what the operations give on one pack small enough to check by hand.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.actor.parallel import prepare_process

prepare_process(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_rl.actor.segments import ShardedSegments  # noqa: E402
from megatron_rl.methods.segments import LocalSegments, Segments  # noqa: E402
from megatron_rl.routing.layout import context_positions, gathered_order  # noqa: E402

CASES = {torch.float64: 16, torch.float32: 6}
OPERATIONS: dict[str, Callable[[Segments, Tensor], Tensor]] = {
    "count": lambda s, x: s.spread(s.count()) + 0 * x.nan_to_num(),
    "sum": lambda s, x: s.spread(s.sum(x)),
    "mean": lambda s, x: s.spread(s.mean(x)),
    "max": lambda s, x: s.spread(s.max(x)),
    "min": lambda s, x: s.spread(s.min(x)),
    "prefix_sum": lambda s, x: s.prefix_sum(x),
    "prefix_count": lambda s, x: s.prefix_count() + 0 * x.nan_to_num(),
    "prefix_min_before": lambda s, x: s.prefix_min_before(x),
    "window_sum_after 0": lambda s, x: s.window_sum_after(x, 0),
    "window_sum_after 3": lambda s, x: s.window_sum_after(x, 3),
    "window_sum_after 99": lambda s, x: s.window_sum_after(x, 99),
    "turn_sum": lambda s, x: s.turn_sum(x),
    "turn_mean": lambda s, x: s.turn_mean(x),
}
"""Each a [T]; with `spread`, so that a loss can count each position once."""


@dataclass(frozen=True)
class Pack:
    """A whole micro-batch; the last, unnumbered sequence is padding."""

    sequence_T: Tensor
    mask_T: Tensor
    turn_T: Tensor | None
    num_sequences: int
    cu_seqlens: Tensor

    def whole(self) -> LocalSegments:
        return LocalSegments(self.sequence_T, self.mask_T, self.num_sequences, self.turn_T)

    def shard(self, group: dist.ProcessGroup) -> tuple[ShardedSegments, Tensor]:
        """This rank's segments, and where its positions stand in the pack."""
        mine = context_positions(self.cu_seqlens, group.rank(), group.size())
        turn_T = None if self.turn_T is None else self.turn_T[mine]
        return ShardedSegments(self.sequence_T[mine], self.mask_T[mine], self.num_sequences, self.cu_seqlens, group, turn_T), mine


def packed(real: list[int], masks: list[list[bool]], turns: list[list[int]] | None, padding: int, size: int) -> Pack:
    """Sequences with their alignment gaps, then padding."""
    unit = 2 * size
    spans = [-(-n // unit) * unit for n in real] + [padding * unit] * (padding > 0)
    ends = torch.tensor([0, *spans]).cumsum(0).int()
    sequence_T = torch.full((sum(spans),), len(real))
    mask_T = torch.zeros(sum(spans), dtype=torch.bool)
    turn_T = torch.full((sum(spans),), -1)
    for i, (begin, n) in enumerate(zip(ends.tolist(), real, strict=False)):
        sequence_T[begin : begin + n] = i
        mask_T[begin : begin + n] = torch.tensor(masks[i], dtype=torch.bool)
        if turns is not None:
            turn_T[begin : begin + n] = torch.tensor(turns[i])
    return Pack(sequence_T, mask_T, turn_T if turns is not None else None, len(real), ends)


def random_pack(seed: int, size: int) -> Pack:
    """One to five sequences of 1 to 30 positions, tool tokens, up to three turns; in the first two no loss token, and a single one."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    real = [draw(1, 30) for _ in range(draw(1, 5))]
    share = float(torch.rand((), generator=g))
    masks = [(torch.rand(n, generator=g) < share).tolist() for n in real]
    if seed < 2:
        masks = [[seed == 1 and i == t == 0 for t in range(n)] for i, n in enumerate(real)]
    turns = [torch.randint(0, 3, (n,), generator=g).sort().values.tolist() for n in real]
    return packed(real, masks, turns if seed % 4 else None, draw(0, 2), size)


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference; equal infinities are equal, anything else that is not finite is infinitely far."""
    gap = torch.where(found == expected, 0.0, (found.double() - expected.double()).abs())
    return float(gap.nan_to_num(nan=torch.inf).amax()) if gap.numel() else 0.0


def gradient(out_T: Tensor, weight_T: Tensor, x_T: Tensor) -> Tensor:
    """Of a loss that counts each position once, some by a weight."""
    finite = torch.where(out_T.isfinite(), out_T, 0.0)
    return torch.autograd.grad((weight_T * finite * finite).sum(), x_T)[0]


def compare(pack: Pack, group: dist.ProcessGroup, seed: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    g = torch.Generator().manual_seed(1000 + seed)
    length = pack.mask_T.numel()
    value_T = torch.where(pack.mask_T, torch.randn(length, generator=g, dtype=torch.float64), torch.nan).to(dtype)
    weight_T = torch.randn(length, generator=g, dtype=torch.float64).to(dtype)
    local = pack.whole()
    sharded, mine = pack.shard(group)
    found = {}
    for name, operation in OPERATIONS.items():
        whole_T, shard_T = value_T.clone().requires_grad_(), value_T[mine].requires_grad_()
        expected_T, found_T = operation(local, whole_T), operation(sharded, shard_T)
        assert found_T.dtype == expected_T.dtype == dtype, f"{name}: {found_T.dtype} for {dtype}"
        expected_grad = gradient(expected_T, weight_T, whole_T)[mine]
        found[name] = distance(found_T, expected_T[mine]), distance(gradient(found_T, weight_T[mine], shard_T), expected_grad)
    return found


def by_hand(group: dist.ProcessGroup) -> dict[str, list[float]]:
    """Two sequences of 7 and 1 positions over this group: the shards' answers, put together again."""
    masks = [[False, True, True, False, True, True, True], [True]]
    pack = packed([7, 1], masks, [[-1, 0, 0, -1, 1, 1, 1], [0]], 1, group.size())
    segments, mine = pack.shard(group)
    x_T = torch.zeros(pack.mask_T.numel())
    x_T[:7] = torch.tensor([torch.nan, 1e6, -3.0, torch.nan, 2.0, 5.0, 4.0])
    x_T[int(pack.cu_seqlens[1])] = 0.125
    order = gathered_order(pack.cu_seqlens, group.size())

    def whole(y_T: Tensor) -> list[float]:
        parts = [torch.empty_like(y_T) for _ in range(group.size())]
        dist.all_gather(parts, y_T.contiguous(), group=group)
        y = torch.cat(parts)[order]
        return [float(v) for v in torch.cat([y[:7], y[pack.cu_seqlens[1]][None]])]

    return {name: whole(operation(segments, x_T[mine]).detach()) for name, operation in OPERATIONS.items()}


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # a hang shows where
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    for size in (1, 2, 4):
        group, _ = dist.new_subgroups(size)
        worst: dict[str, dict[str, list[float]]] = {}
        for dtype, cases in CASES.items():
            table = worst.setdefault(str(dtype), {name: [0.0, 0.0] for name in OPERATIONS})
            for seed in range(cases):
                for name, pair in compare(random_pack(seed, size), group, seed, dtype).items():
                    table[name] = [max(a, b) for a, b in zip(table[name], pair, strict=True)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, worst)
        merged = {d: {n: [max(w[d][n][i] for w in everyone) for i in (0, 1)] for n in OPERATIONS} for d in worst}
        result[str(size)] = {"worst": merged, "by_hand": by_hand(group)}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
