"""On every rank of every layout, each router takes the routes given for each token: once a forward and once a recomputation.

The covering of `tools/layouts/replays.py`; `python tools/check_replay.py` runs all combinations.
"""

from __future__ import annotations

from typing import Any

import pytest

from tools.layouts.matrix import LAYOUTS
from tools.layouts.replays import DENSE_STAGE, MODELS, ReplayCase, faults, problem, quick

pytestmark = pytest.mark.timeout(900)  # as in test_layouts.py


@pytest.mark.parametrize("case", quick(), ids=lambda case: case.name)
def test_every_map_is_the_given_one(runs: dict[str, Any], case: ReplayCase) -> None:
    """Of 82 tokens in 3 MoE layers (2 where a whole stage is dense) none may be missing, met twice or routed otherwise."""
    assert problem(case, runs[case.name]) is None
    layers = 2 if case.model == DENSE_STAGE else 3
    assert runs[case.name]["rows"] >= 3 * 82 * layers, "scored, forward and recomputed"


@pytest.mark.parametrize("case", faults(), ids=lambda case: case.name)
def test_routes_put_wrong_are_seen(runs: dict[str, Any], case: ReplayCase) -> None:
    """Rows, layers and micro-batches taken for one another route most tokens otherwise."""
    assert "routed otherwise than given" in str(problem(case, runs[case.name]))
    assert runs[case.name]["wrong"] > 0.5 * runs[case.name]["rows"]


def test_a_router_that_was_passed_over_or_met_twice_is_seen() -> None:
    case = ReplayCase("TP2", "full", 1)
    seen = {"wrong": 0, "scored": [1], "forward": [1], "recomputed": [1], "micro_batches": 1, "moved": True}
    assert problem(case, seen) is None
    assert "recomputed [0, 1] times" in str(problem(case, seen | {"recomputed": [0, 1]}))
    assert "forward [1, 2] times" in str(problem(case, seen | {"forward": [1, 2]}))
    assert "recomputed [1] times in some layer, not 0" in str(problem(ReplayCase("TP2", "none", 1), seen))


def test_the_covering_covers() -> None:
    """Both kinds of recomputation and both models meet every split (but how an expert is cut), and every layout 1 and 4 micro-batches."""
    cases = quick()
    traits = frozenset().union(*(layout.traits for layout in LAYOUTS.values())) - {"expert_tensor"}

    def met(chosen: list[ReplayCase]) -> frozenset[str]:
        return frozenset().union(*(case.where.traits for case in chosen))

    for kind in ("full", "selective"):
        assert met([c for c in cases if c.recompute == kind]) >= traits, kind
    assert met([c for c in cases if c.model == MODELS[1]]) >= traits
    assert met([c for c in cases if c.model == MODELS[0]]) >= traits - {"data"}
    assert {(c.layout, c.micro_batches) for c in cases} == {(name, n) for name in LAYOUTS for n in (1, 4)}
