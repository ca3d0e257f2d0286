"""Only a rank's own shard reaches it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks

pytestmark = pytest.mark.dist


def test_a_rank_gets_the_bytes_of_its_own_shard(tmp_path: Path) -> None:
    """TP2 x PP2 with 18 and 6 layers: of 2 x 800 positions, half the rows and the stage's layers, one byte an id of 8.

    400 x 18 x 8 = 57,600 bytes of routes a micro-batch on the first stage, 19,200 on the second. With its columns a rank of the second
    stage has a shard far below the whole, and below what the first stage has; what came over the wire may exceed it by a tenth.
    """
    run_ranks("transport.py", str(tmp_path / "out.json"), processes=4)
    ranks = json.loads((tmp_path / "out.json").read_text())
    assert [r["leader"] for r in ranks] == [True, False, False, False]
    assert all(r["right"] and r["micro_batches"] == 2 for r in ranks)
    assert [r["route_bytes"] for r in ranks] == [2 * 57_600] * 2 + [2 * 19_200] * 2
    assert ranks[0]["host_bytes"] == 0
    for rank in ranks[1:]:
        assert rank["shard_bytes"] < rank["host_bytes"] <= 1.1 * rank["shard_bytes"], rank
