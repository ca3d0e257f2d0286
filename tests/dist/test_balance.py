"""Trajectories go from leader to leader and arrive whole; training on a balanced batch is training on the same batch.

The skewed batch has a rank without loss tokens, one with fewer sequences than micro-batches, a sequence of one position, and
micro-batches of one sequence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks

EXCHANGES: dict[str, dict[str, Any]] = {
    # Costs n + n^2 / 100 of 30 positions and of 1 are 39 and 1: loads 78, 156, 1, 78.
    "leaders of four": {"lengths": [[31, 31], [31, 31, 31, 31], [2], [31, 31]]},
    "leaders of two ranks each": {"replica": 2, "lengths": [[11], [31, 31, 31, 31]]},
    "one has none": {"lengths": [[31, 31], [31, 31], [], [31, 31]]},
    # More than a megabyte a message, which no socket takes unread: sending before receiving would hang.
    "all at a time": {"ring": True, "lengths": [[20_001, 5 + r] for r in range(4)]},
}
TRAININGS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "DP2 balanced": {"balance": True},
    "DP2 EP2 balanced": {"balance": True, "parallel": {"expert": 2}},
}


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("exchange") / "out.json"
    run_ranks("balance.py", "exchange", str(out), json.dumps(EXCHANGES), processes=4)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def trained(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, found = tmp_path_factory.mktemp("balance"), {}
    for processes, runs in ((1, {"one": {}}), (2, TRAININGS)):
        out = folder / f"{processes}.json"
        run_ranks("balance.py", "train", str(out), str(tiny_moe), json.dumps(runs), processes=processes)
        found |= json.loads(out.read_text())
    return found


@pytest.mark.parametrize("case", EXCHANGES)
def test_every_trajectory_arrives_once_with_all_that_is_its_own(exchanged: dict[str, list[dict[str, Any]]], case: str) -> None:
    """The workers compare every array of each trajectory with the original."""
    names = sorted(name for rank in exchanged[case] for name in rank.get("names", ()))
    assert names == [100 * owner + i for owner, lengths in enumerate(EXCHANGES[case]["lengths"]) for i in range(len(lengths))]


def test_the_costliest_leader_is_relieved(exchanged: dict[str, list[dict[str, Any]]]) -> None:
    """156 and 1: two of 39 go over. 156 and 10: two of 39 again."""
    ranks = exchanged["leaders of four"]
    assert [r["before"] for r in ranks] == pytest.approx([78, 156, 1.01, 78])
    assert [r["after"] for r in ranks] == pytest.approx([78, 78, 79.01, 78])
    assert [r["after"] for r in exchanged["leaders of two ranks each"] if "after" in r] == pytest.approx([89, 78])


def test_nothing_passes_through_a_rank_that_is_no_party(exchanged: dict[str, list[dict[str, Any]]]) -> None:
    """Leader 1 gives to leader 2: ranks 0 and 3 touch no byte of it. With replicas [0, 1] and [2, 3], leader 2 gives to leader 0."""
    sent = {case: [r["traffic"]["sent"] for r in ranks] for case, ranks in exchanged.items()}
    got = {case: [r["traffic"]["got"] for r in ranks] for case, ranks in exchanged.items()}
    given = sent["leaders of four"][1]
    assert given > 2 * 30 * 4 * 2, "two trajectories with their routes, a byte for each of 30 positions, 4 layers and 2 experts"
    assert (sent["leaders of four"], got["leaders of four"]) == ([0, given, 0, 0], [0, 0, given, 0])
    given = sent["leaders of two ranks each"][2]
    assert (sent["leaders of two ranks each"], got["leaders of two ranks each"]) == ([0, 0, given, 0], [given, 0, 0, 0])


def test_everybody_gathers_lengths_alone(exchanged: dict[str, list[dict[str, Any]]]) -> None:
    """Eight bytes a trajectory and pickle's name for an array, where routes of a single one are 240 bytes."""
    for rank in exchanged["leaders of four"]:
        assert 0 < rank["traffic"]["gathered"] <= 8 * 4 + 150


def test_all_exchange_at_a_time(exchanged: dict[str, list[dict[str, Any]]]) -> None:
    """A ring in which everybody sends before anybody could have received."""
    ring = exchanged["all at a time"]
    for rank, found in enumerate(ring):
        assert found["traffic"]["got"] == ring[rank - 1]["traffic"]["sent"] > 1_000_000
        assert found["names"] == [100 * rank + 1, 100 * ((rank - 1) % 4)]


@pytest.mark.parametrize("case", TRAININGS)
def test_training_is_that_of_one_process(trained: dict[str, dict[str, Any]], case: str) -> None:
    """1e-5 is fp32 summation order. The second step's ratios are off 1, so a sequence cut from its own old log-probs would show."""
    for expected, found in zip(trained["one"]["steps"], trained[case]["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_balance_lowers_the_maximum(trained: dict[str, dict[str, Any]]) -> None:
    """The first leader had 95 % of the work; the seven can be cut into halves within a tenth."""
    skewed, even = trained["DP2"]["loads"], trained["DP2 balanced"]["loads"]
    assert sum(even) == pytest.approx(sum(skewed))
    assert max(skewed) > 0.9 * sum(skewed)
    assert max(even) < 0.55 * sum(even)
    assert len(trained["DP2 balanced"]["sequences"]) < len(trained["DP2"]["sequences"])


def test_the_skewed_batch_has_the_edges(trained: dict[str, dict[str, Any]]) -> None:
    assert trained["DP2"]["loss_tokens"] == [196, 0], "tokens of the first leader's seven, less seven prompts; the second has none"
    assert trained["DP2"]["fillers"][0] == 0
    assert trained["DP2"]["fillers"][1] == len(trained["DP2"]["sequences"]) - 2 > 0
    assert 1 in trained["DP2"]["sequences"], "a micro-batch of one sequence"
    assert sum(trained["DP2 balanced"]["fillers"]) == 0
    assert trained["one"]["steps"][0]["grad_norm"] > 0
    assert trained["one"]["steps"][1]["loss"] != pytest.approx(trained["one"]["steps"][0]["loss"], rel=1e-3)
