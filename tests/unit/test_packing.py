"""Packing loses nothing, invents nothing, and keeps to the budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.packing import FILLER_LENGTH, SPARE, Cost, best_fit, count_bins, pack, positions_of, split_bins
from megatron_rl.types import Batch, Prompt, Trajectory

LAYERS, K, EXPERTS = 3, 2, 5


def trajectory(n: int, seed: int, routes: bool = True) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = np.arange(n) >= max(1, n // 2)
    return Trajectory(
        prompt=Prompt("p", np.zeros(1, np.int32), "", ""),
        group="g",
        tokens=rng.integers(1, 100, n).astype(np.int32),
        loss_mask=mask,
        behaviour_logp=np.where(mask, -rng.random(n), np.nan).astype(np.float32),
        versions=np.where(mask, seed, -1).astype(np.int32),
        turns=np.where(mask, 0, -1).astype(np.int32),
        routes=np.argsort(rng.random((n - 1, LAYERS, EXPERTS)), -1)[..., :K].astype(np.uint8) if routes else None,
        finish_reason="stop",
        text="",
    )


def batch_of(lengths: list[int]) -> Batch:
    trajectories = tuple(trajectory(n, i) for i, n in enumerate(lengths))
    return Batch(trajectories, tuple(np.where(t.loss_mask, i + 1.0, 0.0).astype(np.float32) for i, t in enumerate(trajectories)))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=20),
    multiple=st.sampled_from([1, 2, 4]),
    align=st.sampled_from([1, 4]),
    extra=st.integers(0, 3),
    uniform=st.booleans(),
)
def test_every_token_is_packed_once_with_its_own_row(lengths: list[int], multiple: int, align: int, extra: int, uniform: bool) -> None:
    budget = 64
    multiple *= align
    batch = batch_of(lengths)
    count = count_bins([positions_of(t, align) for t in batch.trajectories], budget) + extra
    packed = pack(batch, budget=budget, multiple_of=multiple, align=align, micro_batches=count, uniform=uniform, experts=EXPERTS)
    assert len(packed) == count
    assert not uniform or len({p.length for p in packed}) == 1
    seen: list[int] = []
    for p in packed:
        assert p.length % multiple == 0
        assert p.routes_TLK is not None
        assert p.cu_seqlens[0] == 0
        assert p.cu_seqlens[-1] == p.length
        assert (p.cu_seqlens % align == 0).all()
        for s, sample in enumerate(p.sample_S.tolist()):
            here = slice(int(p.cu_seqlens[s]), int(p.cu_seqlens[s + 1]))
            assert p.positions_T[here].tolist() == list(range(here.stop - here.start))
            if sample < 0:
                assert not p.mask_T[here].any()
                continue
            seen.append(sample)
            t = batch.trajectories[sample]
            assert here.stop - here.start == positions_of(t, align)
            here = slice(here.start, here.start + len(t.tokens) - 1)
            assert p.tokens_T[here].tolist() == t.tokens[:-1].tolist()
            assert p.labels_T[here].tolist() == t.tokens[1:].tolist()
            assert p.mask_T[here].tolist() == t.loss_mask[1:].tolist()
            assert p.advantages_T[here].tolist() == batch.advantages[sample][1:].tolist()
            assert np.array_equal(p.behaviour_logp_T[here].numpy(), t.behaviour_logp[1:], equal_nan=True)
            assert t.routes is not None
            assert np.array_equal(p.routes_TLK[here].numpy(), t.routes)
            assert (p.sequence_T[here] == s).all()
        padding = p.sequence_T == p.num_sequences
        real = [len(batch.trajectories[i].tokens) - 1 if i >= 0 else FILLER_LENGTH for i in p.sample_S.tolist()]
        assert int(padding.sum()) == p.length - sum(real)
        assert not p.mask_T[padding].any()
        ordered = p.routes_TLK[padding].long().sort(-1).values
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert sorted(seen) == list(range(len(lengths)))


ATTENTION = Cost(linear=1.0, quadratic=0.1)
"""Attention overtakes the rest at 10 positions."""


def costs_of(bins: list[list[int]], lengths: list[int], cost: Cost) -> list[float]:
    return [sum(cost(lengths[i]) for i in b) for b in bins]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), extra=st.integers(0, 5), quadratic=st.sampled_from([0.0, 0.1]))
def test_bins_keep_to_the_budget_and_none_is_empty_while_sequences_last(lengths: list[int], extra: int, quadratic: float) -> None:
    cost = Cost(1.0, quadratic)
    bins = split_bins(lengths, count_bins(lengths, 64) + extra, 64, cost)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 64 for b in bins)
    assert sum(bool(b) for b in bins) == min(len(bins), len(lengths))
    found = costs_of(bins, lengths, cost)
    assert found == sorted(found, reverse=True), "costliest first, on every rank, so that ranks which wait for each other meet their like"


def test_bins_are_evened_out() -> None:
    """Four bins of budget 100 hold forty tens in one go as 100 each; five bins must come out at 80 each, not 100 and 0."""
    bins = split_bins([10] * 40, 5, 100)
    assert sorted(sum(10 for _ in b) for b in bins) == [80] * 5


def test_bins_are_evened_out_over_cost_not_positions() -> None:
    """Cost n + n^2 / 10: two of 30 cost 120 each, twelve of 10 cost 20 each. In three bins: 120, 120, 120 + 120 for positions (30, 30,
    120) is 240 at most; the even split gives each bin 160: a 30 and two 10s twice, eight 10s."""
    lengths = [30, 30] + [10] * 12
    bins = split_bins(lengths, 3, 120, ATTENTION)
    assert costs_of(bins, lengths, ATTENTION) == [160.0, 160.0, 160.0]
    assert sorted(sum(lengths[i] for i in b) for b in bins) == [50, 50, 80]
    by_positions = costs_of(split_bins(lengths, 3, 120), lengths, ATTENTION)
    assert max(by_positions) > 160


def test_the_budget_binds_before_the_cost() -> None:
    """Even costs would be 160 each, as above, with 80 positions in one bin: a budget of 64 allows none of more than 64."""
    lengths = [30, 30] + [10] * 12
    bins = split_bins(lengths, 3, 64, ATTENTION)
    assert [sum(lengths[i] for i in b) for b in bins] == [60, 60, 60]


def test_bins_too_tight_to_be_even_still_fit() -> None:
    """Only 6 + 4 and 5 + 3 + 2 fill two bins of 10. Longest first into the emptiest gives 6 + 3, 5 + 4 and no room for 2."""
    assert sorted(sorted(b) for b in split_bins([6, 5, 4, 3, 2], 2, 10)) == [[0, 2], [1, 3, 4]]


def test_many_micro_batches_get_one_spare() -> None:
    """Sixty-four full bins and two to spare; thirty-one, none."""
    assert count_bins([10] * 2 * SPARE, 10) == 2 * SPARE + 2
    assert count_bins([10] * (SPARE - 1), 10) == SPARE - 1
    assert count_bins([], 10) == 1


def test_best_fit_decreasing_by_hand() -> None:
    # 6 | 5 4 | 3 2 : 6+4 would exceed 9, 5+4 fits, 3+6 fits in the first
    assert [sorted(b) for b in best_fit([5, 6, 4, 3, 2], 9)] == [[1, 3], [0, 2], [4]]


def test_a_sequence_longer_than_the_budget_is_a_users_error() -> None:
    with pytest.raises(ValueError, match=r"train.tokens_per_micro_batch: 16 cannot hold a sequence of 20 positions; raise it"):
        count_bins([20, 3], 16)


def test_a_rank_with_fewer_sequences_than_micro_batches_gets_fillers_without_loss() -> None:
    packed = pack(batch_of([4]), budget=16, micro_batches=3, experts=EXPERTS)
    assert [p.num_sequences for p in packed] == [1, 1, 1]
    assert sorted(int(p.mask_T.sum()) for p in packed) == [0, 0, 2]
    assert all(p.length >= 2 for p in packed)


def test_a_rank_without_sequences_gets_fillers_with_the_others_routes() -> None:
    """Replay wants a row of K distinct experts a layer for every position, fillers too."""
    packed = pack(Batch((), ()), budget=16, micro_batches=2, experts=EXPERTS, like=np.empty((0, LAYERS, K), np.uint8))
    for p in packed:
        assert p.sample_S.tolist() == [-1]
        assert not p.mask_T.any()
        assert p.routes_TLK is not None
        assert p.routes_TLK.shape == (FILLER_LENGTH, LAYERS, K)
        assert (p.routes_TLK[..., 0] != p.routes_TLK[..., 1]).all()


def test_a_sequence_of_one_position() -> None:
    """Two tokens, the second predicted from the first: one micro-batch, one sequence, one position."""
    packed = pack(batch_of([2]), budget=16, experts=EXPERTS)
    assert len(packed) == 1
    # padded to the length of a filler: the padding is a sequence of its own
    assert packed[0].cu_seqlens.tolist() == [0, 1, 2]
    assert packed[0].mask_T.tolist() == [True, False]


def test_uniform_micro_batches_are_evened_out_over_positions() -> None:
    """Pipelines pad all to the longest: 60 each here, where even costs would pad to 80."""
    batch = batch_of([31, 31] + [11] * 12)
    packed = pack(batch, budget=120, cost=ATTENTION, micro_batches=3, uniform=True, experts=EXPERTS)
    assert [p.length for p in packed] == [60, 60, 60]
    free = pack(batch, budget=120, cost=ATTENTION, micro_batches=3, experts=EXPERTS)
    assert sorted(p.length for p in free) == [50, 50, 80]


def test_routes_of_some_trajectories_only_are_refused() -> None:
    mixed = Batch((trajectory(4, 0), trajectory(4, 1, routes=False)), (np.zeros(4, np.float32),) * 2)
    with pytest.raises(ValueError, match="no routes, while others of the batch have them"):
        pack(mixed, budget=16, experts=EXPERTS)


def test_padding_in_numbers() -> None:
    packed = pack(batch_of([4, 3]), budget=16, multiple_of=4, experts=EXPERTS)[0]
    # 3 + 2 positions, padded to 8: the padding is a sequence of its own
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packed.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert packed.sequence_T.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert torch.isnan(packed.behaviour_logp_T[5:]).all()


def test_alignment_gaps_in_numbers() -> None:
    packed = pack(batch_of([4, 6]), budget=16, multiple_of=8, align=4, experts=EXPERTS)[0]
    # 3 + 5 positions, rounded up to 4 + 8, padded to 16; a gap counts on in its sequence but belongs to none
    assert packed.cu_seqlens.tolist() == [0, 4, 12, 16]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert packed.sequence_T.tolist() == [0, 0, 0, 2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    gap = packed.sequence_T == 2
    assert packed.labels_T[gap].tolist() == [0] * 8
    assert torch.isnan(packed.behaviour_logp_T[gap]).all()
