"""Packing into micro-batches and balance over data-parallel ranks: how even, how fast, against what else can be imported.

    python -m tools.bench.packing                          # this package alone
    .peer/bin/python -m tools.bench.packing --leaders      # micro-batches only, with verl beside it (tools/peer_env.sh)

Costs are those of Qwen3-30B-A3B. max/mean is the cost of the costliest micro-batch (rank) over the mean; fullest is the positions of
the fullest micro-batch over the budget, which must not exceed 1.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_rl.data.packing import Cost, best_fit, count_bins, split_bins

QWEN3_30B_A3B = Cost(linear=6.084e9, quadratic=393_216.0)
"""`actor.balance.model_cost` of it."""
BUDGET = 32_768
Partition = Callable[[Sequence[int], int], list[list[int]]]


def lengths_of(kind: str, count: int, seed: int) -> list[int]:
    """Positions of `count` answers: reasoning (log-normal, median 1,800), uniform, or 5 % long ones among short ones."""
    rng = np.random.default_rng(seed)
    if kind == "log-normal":
        return np.clip(rng.lognormal(7.5, 0.9, count), 64, 16_384).astype(int).tolist()
    if kind == "uniform":
        return rng.integers(100, 8_192, count).tolist()
    long, short = rng.integers(12_000, 16_384, count), rng.integers(200, 1_500, count)
    return np.where(rng.random(count) < 0.05, long, short).tolist()


def first_fit(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """First-fit decreasing, as packers commonly have it; `bins` is not looked at."""
    packed: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), len(packed))
        if place == len(packed):
            packed.append([])
            room.append(BUDGET)
        packed[place].append(i)
        room[place] -= lengths[i]
    return packed


def partitions() -> dict[str, Partition]:
    """By name; verl and binpacking where they are installed. Both are given costs, and know no budget."""
    found: dict[str, Partition] = {
        "megatron_rl": lambda lengths, bins: split_bins(lengths, bins, BUDGET, QWEN3_30B_A3B),
        "best-fit decreasing": lambda lengths, bins: best_fit(lengths, BUDGET),
        "first-fit decreasing": first_fit,
    }
    verl = _optional("verl.utils.seqlen_balancing")
    if verl is not None:
        split = verl.get_seqlen_balanced_partitions
        found["verl, Karmarkar-Karp over cost"] = lambda lengths, bins: split([int(QWEN3_30B_A3B(n)) for n in lengths], bins, False)
        found["verl, Karmarkar-Karp over length"] = lambda lengths, bins: split(list(lengths), bins, False)
    binpacking = _optional("binpacking")
    if binpacking is not None:
        constant = binpacking.to_constant_bin_number
        found["binpacking"] = lambda lengths, bins: [list(b) for b in constant({i: QWEN3_30B_A3B(n) for i, n in enumerate(lengths)}, bins)]
    return found


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None


def measure(partition: Partition, lengths: Sequence[int], bins: int, repeats: int) -> tuple[int, float, float, float]:
    """(bins, max/mean cost, fullest, milliseconds of the quickest)."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        packed = partition(lengths, bins)
        seconds.append(time.perf_counter() - began)
    costs = [sum(QWEN3_30B_A3B(lengths[i]) for i in b) for b in packed]
    fullest = max(sum(lengths[i] for i in b) for b in packed) / BUDGET
    return len(packed), max(costs) * len(costs) / sum(costs), fullest, min(seconds) * 1e3


def micro_batches(count: int, repeats: int) -> None:
    """One rank's answers into as many micro-batches as they need."""
    print("| lengths | sequences | partition | micro-batches | max/mean cost | fullest | ms |\n|---|---|---|---|---|---|---|")
    for kind in ("log-normal", "uniform", "long tail"):
        lengths = lengths_of(kind, count, seed=0)
        bins = count_bins(lengths, BUDGET)
        for name, partition in partitions().items():
            number, ratio, fullest, milliseconds = measure(partition, lengths, bins, repeats)
            print(f"| {kind} | {count} | {name} | {number} | {ratio:.3f} | {fullest:.3f} | {milliseconds:.1f} |", flush=True)


def ranks(owners: int, each: int) -> None:
    """Answers of `owners` leaders, whose prompts differ in difficulty, before and after `balance.plan`."""
    from megatron_rl.actor.balance import plan

    print("| lengths | leaders | answers each | max/mean before | after | answers moved | ms |\n|---|---|---|---|---|---|---|")
    for kind in ("log-normal", "uniform", "long tail"):
        lengths = np.array(lengths_of(kind, owners * each, seed=0))
        # Groups of 8 answers to one prompt are alike in length: sorting within spans of 8 groups makes neighbours so.
        spans = np.split(lengths, range(64, len(lengths), 64))
        order = np.random.default_rng(0).permutation(len(lengths) // 8)
        groups = np.concatenate([np.sort(s) for s in spans]).reshape(-1, 8)[order].reshape(owners, each)
        costs = [[QWEN3_30B_A3B(int(n)) for n in mine] for mine in groups]
        began = time.perf_counter()
        moves = plan(costs)
        milliseconds = (time.perf_counter() - began) * 1e3
        before, after = [sum(c) for c in costs], [sum(c) for c in costs]
        for m in moves:
            after[m.source] -= costs[m.source][m.index]
            after[m.destination] += costs[m.source][m.index]
        mean = sum(before) / owners
        print(
            f"| {kind} | {owners} | {each} | {max(before) / mean:.3f} | {max(after) / mean:.3f} | {len(moves)} of {owners * each} | "
            f"{milliseconds:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sequences", type=int, nargs="*", default=[64, 512, 2048], help="sequences a rank")
    parser.add_argument("--leaders", type=int, nargs="*", default=[4, 16, 64], help="data-parallel groups")
    parser.add_argument("--answers", type=int, default=128, help="answers a leader")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each partition; the quickest counts")
    args = parser.parse_args()
    for count in args.sequences:
        micro_batches(count, args.repeats)
    for owners in args.leaders:
        ranks(owners, args.answers)


if __name__ == "__main__":
    main()
