"""The policy over zig-zag shards says what one process says of the same ragged sequences: rotary positions, causal attention, routes.

The shards' pack has alignment gaps, the oracle's has none, so the comparison also shows that a gap reaches no real token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tools.make_tiny_moe import make_tiny_moe


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = Path(tmp_path_factory.mktemp("context"))
    make_tiny_moe(folder / "model")
    run_ranks("context_parallel.py", str(folder / "model"), str(folder / "out.json"), processes=2)
    return json.loads((folder / "out.json").read_text())


def test_the_pack_is_what_it_should_be(found: dict[str, Any]) -> None:
    """Trajectories of 5, 9, 17, 12, 30, 3 and 8 tokens fill 77 positions; rounded up to fours, 4 + 8 + 16 + 12 + 32 + 4 + 8 = 84."""
    assert (found["positions"], found["whole"], found["shard"]) == (77, 84, 42)
    assert found["same_tokens"]


def test_hidden_states(found: dict[str, Any]) -> None:
    """After the final norm they are of order 1."""
    assert found["hidden"] < 1e-5
    assert found["hidden_scale"] > 1


def test_gradients_of_every_parameter(found: dict[str, Any]) -> None:
    """Relative to the parameter's largest entry; keys and values get theirs from queries on both ranks."""
    assert any("linear_qkv" in name for name in found["gradients"])
    assert max(found["gradients"].values()) < 1e-5
