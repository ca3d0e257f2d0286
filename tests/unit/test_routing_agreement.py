"""Agreement of two routings: numbers by hand, sums that add up whatever the split, and padding without effect."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.routing.agreement import NEVER, LayerCounts, by_flips, compare, summary, violation

# Four experts, top-2. Token 0 agrees (in another order), token 1 shares one expert, token 2 shares none, token 3 is padding.
LIVE = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 3]])
GIVEN = torch.tensor([[1, 0], [1, 2], [2, 3], [0, 1]])
PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.26, 0.14, 0.1], [0.3, 0.28, 0.26, 0.16], [0.1, 0.2, 0.3, 0.4]])
REAL = torch.tensor([True, True, True, False])


def counted(rows: torch.Tensor) -> tuple[LayerCounts, torch.Tensor]:
    return compare(LIVE[rows], GIVEN[rows], PROBS.log()[rows], REAL[rows])


def test_one_layer_by_hand() -> None:
    counts, differs = counted(torch.arange(4))
    assert differs.tolist() == [False, True, True, False]
    assert (counts.tokens, counts.exact) == (3, 1)
    assert counts.overlap == pytest.approx(1 + 0.5 + 0)
    assert counts.jaccard == pytest.approx(1 + 1 / 3 + 0)
    # the margin is log p of the second chosen expert minus that of the best one left out
    assert counts.margin_elsewhere == pytest.approx(math.log(0.3 / 0.2), rel=1e-5)
    assert counts.margin_at_flips == pytest.approx(math.log(0.26 / 0.14) + math.log(0.28 / 0.26), rel=1e-5)
    assert counts.live_load_E.tolist() == [3, 3, 0, 0]
    assert counts.given_load_E.tolist() == [1, 2, 2, 1]


def test_counts_add_up() -> None:
    whole, _ = counted(torch.arange(4))
    parts = counted(torch.tensor([0, 3]))[0] + counted(torch.tensor([1, 2]))[0]
    assert summary({0: parts}) == pytest.approx(summary({0: whole}))


def test_summary_names_layers_and_leaves_out_means_over_nothing() -> None:
    counts, _ = counted(torch.arange(4))
    found = summary({0: counts, 3: counts})
    assert found["routing/exact"] == found["routing/exact/layer_03"] == pytest.approx(1 / 3)
    assert found["routing/load_violation_live"] == pytest.approx(1.0)  # 3 of a mean of 1.5
    same, _ = compare(LIVE, LIVE, PROBS.log(), REAL)
    assert "routing/margin_at_flips" not in summary({0: same})
    assert summary({0: same})["routing/jaccard"] == 1
    none, _ = compare(LIVE, GIVEN, PROBS.log(), torch.zeros(4, dtype=torch.bool))
    assert summary({0: none}) == {}


def test_every_expert_chosen_leaves_no_margin() -> None:
    all_of_them = torch.tensor([[0, 1, 2, 3]])
    counts, differs = compare(all_of_them, all_of_them.flip(1), PROBS[:1].log(), torch.tensor([True]))
    assert not differs.any()
    assert counts.margin_elsewhere == 0


def test_violation_of_balance_and_of_nothing() -> None:
    assert violation(torch.tensor([2.0, 2.0])) == 0
    assert violation(torch.zeros(2)) == 0


def test_log_ratio_by_flips() -> None:
    """Flips 0, 1, 3 with d = 0.1, -0.2, 0.4, and flips 0 with d = 0.5: prefix flips are 0, 1, 4, 0, drifts 0.1, -0.1, 0.3, 0.5."""
    found = by_flips([torch.tensor([0, 1, 3]), torch.tensor([0])], [torch.tensor([0.1, -0.2, 0.4]), torch.tensor([0.5])])
    assert found["routing/abs_d/flips_0"] == pytest.approx(0.3)
    assert found["routing/abs_d/flips_1"] == pytest.approx(0.2)
    assert found["routing/abs_d/flips_2-3"] == pytest.approx(0.4)
    assert found["routing/prefix_drift/flips_0"] == pytest.approx(0.3)
    assert found["routing/prefix_drift/flips_4+"] == pytest.approx(0.3)
    assert "routing/abs_d/flips_4+" not in found
    assert by_flips([], []) == {}


def test_never_is_deeper_than_any_layer() -> None:
    assert NEVER > 10**6
