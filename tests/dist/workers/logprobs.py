"""Run on forked ranks: vocabulary statistics over shards against the same from the whole vocabulary on each rank; fails where they differ.

Four ranks, which also form two groups of two that do the same. 29 tokens padded to 40: over two ranks the last shard is half padding,
over four it is nothing else. Weights are multiples of 1/4, so that top-K meets ties within and across shards.
"""

from __future__ import annotations

import faulthandler
import itertools
from typing import Any

from megatron_rl.actor.parallel import prepare_process

prepare_process(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_rl.actor.divergences import exact_divergences  # noqa: E402
from megatron_rl.actor.logprobs import Support, VocabShard, best_tokens, vocabulary_stats  # noqa: E402

T, H, V, PADDED = 12, 6, 29, 40
WHOLE = VocabShard(start=0, true_size=V, group=None)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6}


def quarters(seed: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, H] multiples of 1/4 from -1 to 1: logits are exact even in bf16, so each sharding rounds alike."""
    return (torch.randint(-4, 5, (rows, H), generator=torch.Generator().manual_seed(seed)) / 4).to(dtype)


def supports() -> dict[str, Support | None]:
    """Every kind; keep-sets cross shards, one row keeps all and one has only tokens of the first shard."""
    g = torch.Generator().manual_seed(3)
    keep_TK = torch.stack([torch.randperm(V, generator=g)[:7] for _ in range(T)])
    keep_TK[torch.rand(T, 7, generator=g) < 0.3] = -1
    keep_TK[0], keep_TK[1] = -1, torch.arange(7)
    both = {"min_p": {"min_p": 0.3}, "keep": {"keep_TK": keep_TK}}
    restricted = {f"{name} {forced}": Support(**kind, force_label=forced) for name, kind in both.items() for forced in (True, False)}
    return {"whole": None, **restricted}


def check(found: Tensor | None, wanted: Tensor | None, tolerance: float, what: str) -> None:
    assert (found is None) == (wanted is None), what
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def mine(weight_VH: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, VocabShard]:
    size = PADDED // group.size()
    start = group.rank() * size
    return weight_VH[start : start + size], VocabShard(start=start, true_size=V, group=group)


def statistics(group: dist.ProcessGroup, name: str, support: Support | None, dtype: torch.dtype, entropy: bool) -> None:
    """Values, and gradients of a random combination, which only rows of this rank and this rank's part of the hidden states reach."""
    hidden_TH, weight_VH = quarters(0, T, dtype), quarters(1, PADDED, dtype)
    labels_T = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(2))
    ids_TJ = torch.cat([labels_T[:, None], torch.tensor([[-1, 0, 14, 28, 33]]).expand(T, -1)], dim=1)
    upstream_2T = torch.randn(2, T, generator=torch.Generator().manual_seed(4))
    asked: dict[str, Any] = {"temperature": 0.7, "chunk": 5, "entropy": entropy, "support": support, "ids_TJ": ids_TJ, "top_k": 12}

    def run(hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard, leaf: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        stats = vocabulary_stats(hidden_TH, weight_VH, labels_T, shard, **asked)
        loss = (stats.logp_T * upstream_2T[0]).sum()
        if stats.entropy_T is not None:
            loss = loss + (stats.entropy_T * upstream_2T[1]).sum()
        return stats, torch.autograd.grad(loss, (leaf, weight_VH))

    hidden_TH.requires_grad_()
    wanted, wanted_grads = run(hidden_TH, weight_VH.requires_grad_(), WHOLE, hidden_TH)
    # sequence parallel: each rank holds a slice of the positions; the gather's backward sums the partial gradients and slices them
    positions = slice(group.rank() * T // group.size(), (group.rank() + 1) * T // group.size())
    slice_SH = hidden_TH.detach()[positions].clone().requires_grad_()
    gathered_TH = gather_from_sequence_parallel_region(slice_SH, tensor_parallel_output_grad=True, group=group)
    rows_VH, shard = mine(weight_VH.detach(), group)
    found, found_grads = run(gathered_TH, rows_VH.clone().requires_grad_(), shard, slice_SH)

    what = f"TP{group.size()} {name} {dtype} entropy={entropy}"
    for field, value in vars(wanted).items():
        check(getattr(found, field), value, TOLERANCE[dtype], f"{what} {field}")
    tolerance = 0.03 if dtype == torch.bfloat16 else TOLERANCE[dtype]  # a bf16 gradient of the hidden states is summed over ranks in bf16
    check(found_grads[0], wanted_grads[0][positions], tolerance, f"{what} gradient of hidden")
    check(found_grads[1], mine(wanted_grads[1], group)[0], TOLERANCE[dtype], f"{what} gradient of weight")


def others(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Divergences and greedy tokens."""
    a, b = (quarters(0, T, dtype), quarters(1, PADDED, dtype)), (quarters(5, T, dtype), quarters(6, PADDED, dtype))
    wanted = exact_divergences(*a, *b, WHOLE, temperature=0.7, chunk=5)
    (a_rows, shard), (b_rows, _) = mine(a[1], group), mine(b[1], group)
    found = exact_divergences(a[0], a_rows, b[0], b_rows, shard, temperature=0.7, chunk=5)
    for name, x, y in zip(("KL", "TV"), found, wanted, strict=True):
        check(x, y, TOLERANCE[dtype], f"TP{group.size()} {name} {dtype}")
    assert torch.equal(best_tokens(a[0], a_rows, shard), best_tokens(*a, WHOLE))


def main() -> None:
    """Both group sizes, every support and dtype, with and without entropy."""
    faulthandler.dump_traceback_later(200, exit=True)
    dist.init_process_group("gloo")
    pair, _ = dist.new_subgroups(2)
    assert dist.group.WORLD is not None
    for group in (pair, dist.group.WORLD):
        for dtype in TOLERANCE:
            others(group, dtype)
            for (name, support), entropy in itertools.product(supports().items(), (False, True)):
                statistics(group, name, support, dtype, entropy)
    dist.barrier()
    if dist.get_rank() == 0:
        print("sharded statistics equal the whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
