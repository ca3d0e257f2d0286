"""Context-parallel shards give every operation of the algebra its value on the whole pack, and every gradient.

The worker draws 22 packs a group size (ragged, alignment gaps, tool tokens, turns, padding, no loss token at all) and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks

OPERATIONS = (
    "count", "sum", "mean", "max", "min", "prefix_sum", "prefix_count", "prefix_min_before",
    "window_sum_after 0", "window_sum_after 3", "window_sum_after 99", "turn_sum", "turn_mean",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = Path(tmp_path_factory.mktemp("segments") / "out.json")
    run_ranks("segments.py", str(out), processes=4)
    return json.loads(out.read_text())


@pytest.mark.parametrize("context", ["1", "2", "4"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_shards_equal_the_whole(found: dict[str, Any], context: str, operation: str) -> None:
    """Values are standard normal and the longest sums have 30 terms: 1e-12 is fp64 rounding, 1e-4 is fp32's, of squares' gradients."""
    worst = found[context]["worst"]
    assert max(worst["torch.float64"][operation]) < 1e-12
    assert worst["torch.float32"][operation][0] < 1e-5
    assert worst["torch.float32"][operation][1] < 1e-4


@pytest.mark.parametrize("context", ["1", "2", "4"])
def test_by_hand(found: dict[str, Any], context: str) -> None:
    """Loss values 1e6, -3 (turn 0), 2, 5, 4 (turn 1), then a sequence of one, 0.125; tool tokens before and between hold NaN.

    The tool tokens do not count, and neither 1e6 nor its rounding reaches the second sequence.
    """
    hand = found[context]["by_hand"]
    inf = float("inf")
    assert hand["prefix_count"] == [0, 1, 2, 0, 3, 4, 5, 1]
    assert hand["count"] == [0, 5, 5, 0, 5, 5, 5, 1]
    assert hand["prefix_sum"] == [0, 1e6, 999997, 0, 999999, 1000004, 1000008, 0.125]
    assert hand["prefix_min_before"] == [0, inf, 1e6, 0, -3, -3, -3, inf]
    assert hand["window_sum_after 3"] == [0, 4, 11, 0, 9, 4, 0, 0]
    assert hand["max"] == [0, 1e6, 1e6, 0, 1e6, 1e6, 1e6, 0.125]
    assert hand["turn_sum"] == [0, 999997, 999997, 0, 11, 11, 11, 0.125]
    assert hand["turn_mean"] == pytest.approx([0, 499998.5, 499998.5, 0, 11 / 3, 11 / 3, 11 / 3, 0.125], rel=1e-6)
