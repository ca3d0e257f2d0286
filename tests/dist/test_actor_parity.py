"""Micro-batches, recomputation and the version of Megatron change nothing that one process computes; other routes do.

Both mini-batches have packing, two turns a sequence, NaN outside the loss mask, random replayed routes and TIS; two optimizer steps
are taken, so that clipping of the gradient and of the ratio both act. Layouts: `test_layouts.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tools.layouts.compare import BOUND, largest
from tools.layouts.launch import ROOT, torchrun
from tools.layouts.matrix import Case, oracle
from tools.layouts.runs import run_cases

pytestmark = pytest.mark.timeout(900)  # as in test_layouts.py

ONE = oracle("grpo")
EQUAL = [
    Case("grpo", budget=32),
    Case("grpo", recompute="full"),
    Case("grpo", recompute="selective"),
    Case("grpo", "PP2", recompute="none"),
    Case("grpo", "PP2xVPP2", recompute="selective"),
]
LIVE = Case("grpo", replay="none")
RECORDED, RECORDED_SPLIT = Case("grpo", replay="R2"), Case("grpo", "TP2xEP2", replay="R2")
DIFFERENT = [LIVE, RECORDED, RECORDED_SPLIT]
NEWER_MEGATRON = ROOT / ".overlays/megatron-core-0.19.2"


@pytest.mark.parametrize("case", EQUAL, ids=lambda case: case.name)
def test_equals_one_process(runs: dict[str, Any], case: Case) -> None:
    difference = largest(runs[ONE.name], runs[case.name])
    assert difference.size <= BOUND, difference


def test_recorded_routes_do_not_depend_on_the_layout(runs: dict[str, Any]) -> None:
    """R2: each rank records the routes of its own positions and replays them in both steps."""
    difference = largest(runs[RECORDED.name], runs[RECORDED_SPLIT.name])
    assert difference.size <= BOUND, difference


@pytest.mark.skipif(not NEWER_MEGATRON.is_dir(), reason="tools/install.sh puts megatron-core 0.19.2 into .overlays")
def test_megatron_core_0_19_2_equals_0_16_1(runs: dict[str, Any], models: Path) -> None:
    """The older version in one process is the oracle of the newer one in two."""
    cases = [Case("grpo", "TP2xEP2"), Case("grpo", "PP2xVPP2", recompute="selective")]
    found = run_cases(models, cases, launch=partial(torchrun, path=NEWER_MEGATRON))
    assert found.keys() == {case.name for case in cases}
    for layout in found.values():
        difference = largest(runs[ONE.name], layout)
        assert difference.size <= BOUND, difference


def test_the_runs_differ_where_they_should(runs: dict[str, Any]) -> None:
    """The comparison can fail: other routes change the loss, smaller budgets the number of micro-batches."""
    one = runs[ONE.name]
    assert runs[LIVE.name]["statistics"]["loss"] != pytest.approx(one["statistics"]["loss"], rel=1e-3)
    assert runs[RECORDED.name]["statistics"]["loss"] != pytest.approx(runs[LIVE.name]["statistics"]["loss"], rel=1e-5)
    # Positions of each mini-batch: 4 + 8 + 16 + 11 + 29 + 2 + 7 + 5 = 82, so 1 micro-batch of 96 and at least 3 of 32.
    assert one["micro_batches"] == [1, 1]
    assert min(runs[EQUAL[0].name]["micro_batches"]) >= 3
    # gradient clipping to norm 1 acted, so a norm counted wrongly over tensor ranks would show in the weights
    assert one["statistics"]["grad_norm"] > 1.5
