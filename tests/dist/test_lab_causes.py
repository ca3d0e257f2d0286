"""The laboratory finds the cause it is given, in the same number of any layout, with Megatron's own forwards.

The trainer stands in the engine's place, so that the two differ by the injected cause alone: other weights, one layer's route forced,
another dtype on the same routes. tests/dist/workers/lab.py injects them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks

pytestmark = pytest.mark.dist
RIGHT = {"routes": "routing", "weights": "staleness", "dtype": "numerics"}
"""Injected cause -> the part it belongs to."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def causes(folder: Path) -> Any:
    run_ranks("lab.py", "causes", str(folder), processes=1)
    return json.loads((folder / "causes.json").read_text())


@pytest.mark.parametrize("cause", RIGHT)
def test_an_injected_cause_takes_the_variance_and_the_tail(causes: Any, cause: str) -> None:
    main = causes["explained"][cause]["orders"][0]
    assert main["order"] == ["staleness", "routing", "numerics"]
    assert main["variance_share"][RIGHT[cause]] >= 0.95
    assert main["tail_share"][RIGHT[cause]] >= 0.95
    assert main["std"][RIGHT[cause]] > 1e-4, "there was something to attribute"


@pytest.mark.parametrize("cause", RIGHT)
def test_parts_add_up_token_by_token(causes: Any, cause: str) -> None:
    assert causes["left"][cause] <= 1e-6


def test_orders_differ_where_newer_weights_choose_other_routes(causes: Any) -> None:
    """Removing routing first gives it those choices; R2 tells them apart, and there was nothing else to route otherwise."""
    found = causes["explained"]["weights"]
    assert not found["commute"]
    assert found["orders"][1]["variance_share"]["routing"] > 0.5
    assert found["within"]["staleness"]["through_routes"] > 0.5
    assert found["orders"][0]["variance_share"]["routing"] == 0.0


def test_rspo_sees_the_routers_move(causes: Any) -> None:
    """Its trust exp(-shift) is below 1 on every token once the router's weights moved, and its mean is near 1 after a small step."""
    row = causes["rspo"]
    assert "missing" not in row
    assert 0.8 < row["mean_weight"] < 1.0


def test_the_forced_layer_is_found(causes: Any) -> None:
    """Layer 1 of three is forced: replaying it alone removes nearly all (what is left came from later routers), replaying 0 nothing."""
    first, forced, last = causes["layers"]
    assert forced["flip_share"] == 1.0 and first["flip_share"] == 0.0
    assert forced["removed_alone"] > 0.9 and first["removed_alone"] == 0.0
    assert last["removed_up_to"] == pytest.approx(1.0, abs=1e-9)


def test_the_same_batch_twice_gives_the_same_summary(causes: Any) -> None:
    assert causes["again"] == causes["summary"]


def test_tensor_and_expert_parallelism_agree_up_to_the_floor(causes: Any, folder: Path) -> None:
    """TP2 x EP2 sums in another order, as other micro-batches do: it may differ by a few times that floor, of 2e-6 nats, and no more."""
    run_ranks("lab.py", "layout", str(folder), processes=2)
    one, other = (x["engines"]["trainer"] for x in (causes["summary"], json.loads((folder / "layout.json").read_text())))
    floor = max(one["floor_worst"]["max_abs_d"], 5e-7)
    assert floor < 1e-5
    assert list(one["conditions"]) == list(other["conditions"])
    for name, here in one["conditions"].items():
        there = other["conditions"][name]
        assert there["condition"]["layout"] == "tp2 ep2"
        assert there["route_mismatch_share"] == here["route_mismatch_share"]
        assert there["max_abs_d"] == pytest.approx(here["max_abs_d"], abs=10 * floor)
        assert there["mean_k3"] == pytest.approx(here["mean_k3"], abs=10 * floor)
