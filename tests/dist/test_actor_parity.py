"""One process is the oracle: every layout gives its loss, metrics, gradient norm, log-probs and weights on the same ragged batch.

The batch has packing, two turns a sequence, NaN outside the loss mask, random replayed routes and TIS; two optimizer steps are
taken, so that clipping of the gradient and of the ratio both act.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import ROOT, torchrun
from tools.make_tiny_moe import make_tiny_moe

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "one": {},
    "more micro-batches": {"budget": 32},
    "full recompute": {"recompute": "full", "budget": 32},
    "selective recompute": {"recompute": "selective", "budget": 32},
    "live routes": {"routing": "live"},
}
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "TP2": {"parallel": {"tensor": 2}},
    "EP2": {"parallel": {"expert": 2}},
    "TP2 EP2": {"parallel": {"tensor": 2, "expert": 2}},
    "PP2": {"parallel": {"pipeline": 2}, "budget": 32},
    "PP2 full recompute": {"parallel": {"pipeline": 2}, "budget": 32, "recompute": "full"},
    "PP2 VPP2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "budget": 32},
    "PP2 VPP2 selective recompute": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "budget": 32, "recompute": "selective"},
    "DP2": {},
}
NEWER_MEGATRON = ROOT / ".overlays/megatron-core-0.19.2"
ON_NEWER_MEGATRON: dict[str, dict[str, Any]] = {
    "TP2 EP2 on 0.19.2": {"parallel": {"tensor": 2, "expert": 2}},
    "PP2 VPP2 selective recompute on 0.19.2": {
        "parallel": {"pipeline": 2, "virtual_pipeline": 2},
        "budget": 32,
        "recompute": "selective",
    },
}
EQUAL = [*(k for k in ONE_PROCESS if k not in ("one", "live routes")), *TWO_PROCESSES]


OBJECTIVES = ("sorl", "gspo", "gmpo", "cppo", "acpo_adaptive", "minpro", "ctpo")
"""A second backward, sequence means, a quantile and bin variances from a pre-pass, prefix scans: each its own way to depend on layout."""


def objective_runs(**layout: Any) -> dict[str, dict[str, Any]]:
    return {name: {"objective": name, **layout} for name in OBJECTIVES}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parity")
    make_tiny_moe(folder / "model")
    found: dict[str, Any] = {}
    split = objective_runs(parallel={"tensor": 2, "expert": 2})
    for processes, runs in (
        (1, ONE_PROCESS | objective_runs(budget=32)),
        (2, TWO_PROCESSES | {f"{n} at TP2 EP2": r for n, r in split.items()}),
    ):
        out = Path(folder / f"{processes}.json")
        torchrun("actor_parity.py", str(folder / "model"), str(out), json.dumps(runs), processes=processes)
        found |= json.loads(out.read_text())
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_is_blind_to_layout_and_micro_batches(results: dict[str, Any], objective: str) -> None:
    assert_same(results[objective], results[f"{objective} at TP2 EP2"])


def test_sorl_divides_by_what_the_clip_took_away(results: dict[str, Any]) -> None:
    """The second step clips, so the divisor is the norm of that gradient, above its floor of 1."""
    assert results["sorl"]["steps"][1]["clipped_gradient_norm"] > 1


@pytest.mark.parametrize("layout", EQUAL)
def test_layout_equals_one_process(results: dict[str, Any], layout: str) -> None:
    assert_same(results["one"], results[layout])


@pytest.mark.skipif(not NEWER_MEGATRON.is_dir(), reason="tools/install.sh puts megatron-core 0.19.2 into .overlays")
def test_megatron_core_0_19_2_equals_0_16_1(results: dict[str, Any], tmp_path: Path) -> None:
    """The older version in one process is the oracle of the newer one in two."""
    make_tiny_moe(tmp_path / "model")
    out = tmp_path / "newer.json"
    torchrun("actor_parity.py", str(tmp_path / "model"), str(out), json.dumps(ON_NEWER_MEGATRON), processes=2, path=str(NEWER_MEGATRON))
    found = json.loads(out.read_text())
    assert found.keys() == ON_NEWER_MEGATRON.keys()
    for layout in found.values():
        assert_same(results["one"], layout)


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for step in (0, 1):
        for name, value in expected["steps"][step].items():
            # 1e-5 relative is fp32 summation order; a share of tokens near a clip bound must not move at all.
            assert found["steps"][step][name] == pytest.approx(value, rel=1e-5, abs=1e-7), f"step {step}: {name}"
    for sample, values in expected["logp"].items():
        assert found["logp"][sample] == pytest.approx(values, abs=1e-5), f"sample {sample}"
    for name, value in expected["weights"].items():
        assert found["weights"][name] == pytest.approx(value, rel=1e-5), name


def test_the_runs_differ_where_they_should(results: dict[str, Any]) -> None:
    """The comparison can fail: other routes change the loss, smaller budgets the number of micro-batches."""
    one = results["one"]
    assert results["live routes"]["steps"][0]["loss"] != pytest.approx(one["steps"][0]["loss"], rel=1e-3)
    assert results["more micro-batches"]["micro_batches"] > one["micro_batches"]
    # gradient clipping to norm 1 acted, so a norm counted wrongly over tensor ranks would show in the weights
    assert one["steps"][0]["grad_norm"] > 1.5
    assert one["steps"][1]["loss"] != pytest.approx(one["steps"][0]["loss"], rel=1e-3)
