"""A critic is one number in every layout, as the policy is: values, loss, gradient norm, values after the steps; and it survives a
checkpoint. One process is the oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks

pytestmark = pytest.mark.dist

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "one": {"save": "one"},
    "more micro-batches": {"budget": 32},
    "bce": {"loss": "bce"},
    "head": {"head": True},
    "resumed": {"load": "one"},
}
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "TP2": {"parallel": {"tensor": 2}},
    "TP2 EP2": {"parallel": {"tensor": 2, "expert": 2}, "save": "split"},
    "PP2": {"parallel": {"pipeline": 2}, "budget": 32},
    "PP2 VPP2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "budget": 32},
    "CP2": {"parallel": {"context": 2}},
    "DP2": {},
    "bce at TP2": {"parallel": {"tensor": 2}, "loss": "bce"},
    "head at TP2": {"parallel": {"tensor": 2}, "head": True},
    "resumed at TP2 EP2": {"parallel": {"tensor": 2, "expert": 2}, "load": "one"},
    "resumed at DP2": {"load": "split"},
}
SAME_AS_ONE = ["more micro-batches", "TP2", "TP2 EP2", "PP2", "PP2 VPP2", "CP2", "DP2"]


@pytest.fixture(scope="module")
def results(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found. The checkpoints that the second worker reads are the first one's."""
    folder, found = tmp_path_factory.mktemp("critic"), {}
    for processes, runs in ((1, ONE_PROCESS), (2, TWO_PROCESSES)):
        out = folder / f"{processes}.json"
        run_ranks("critic.py", str(tiny_moe), str(folder), str(out), json.dumps(runs), processes=processes)
        found |= json.loads(out.read_text())
    return found


def assert_same(expected: dict[str, Any], found: dict[str, Any], names: tuple[str, ...], steps: int) -> None:
    """1e-5 is fp32 summation order; values are of the order of 1."""
    for name in names:
        assert found[name].keys() == expected[name].keys()
        for sample, values in expected[name].items():
            assert found[name][sample] == pytest.approx(values, rel=1e-5, abs=1e-5), f"{name} of sample {sample}"
    for step, (wanted, got) in enumerate(zip(expected["steps"][-steps:], found["steps"][-steps:], strict=True)):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6), f"step {step}"


@pytest.mark.parametrize("layout", SAME_AS_ONE)
def test_layout_equals_one_process(results: dict[str, Any], layout: str) -> None:
    assert_same(results["one"], results[layout], ("values", "values_between", "values_after"), 3)


def test_cross_entropy_too(results: dict[str, Any]) -> None:
    assert_same(results["bce"], results["bce at TP2"], ("values", "values_between", "values_after"), 3)
    assert all(0 < v < 1 for values in results["bce"]["values"].values() for v in values), "probabilities"


@pytest.mark.parametrize("case", ["head", "head at TP2"])
def test_the_heads_gradient_is_autograds(results: dict[str, Any], case: str) -> None:
    """Twice the gradient, as when both tensor ranks counted it, would be an error of 1."""
    assert results[case]["head_gradient_error"] < 1e-5


def test_a_resumed_critic_goes_on_to_the_last_bit(results: dict[str, Any]) -> None:
    one, resumed = results["one"], results["resumed"]
    assert resumed["values_between"] == one["values_between"]
    assert resumed["steps"] == one["steps"][1:], "the optimizer's moments came back too"
    assert resumed["values_after"] == one["values_after"]


@pytest.mark.parametrize("layout", ["TP2 EP2", "DP2"])
def test_a_checkpoint_opens_in_another_layout(results: dict[str, Any], layout: str) -> None:
    """From one process to TP2 EP2, whose experts have an optimizer of their own, and from there to DP2, whose have not."""
    assert_same(results["one"], results[f"resumed at {layout}"], ("values_between", "values_after"), 2)


def test_a_checkpoint_without_a_critic_is_refused(results: dict[str, Any]) -> None:
    for case in ("resumed", "resumed at TP2 EP2"):
        assert results[case]["refusal"].endswith("step_000001' has no critic: it was trained without; start in another logging.dir"), (
            results[case]["refusal"]
        )


def test_the_runs_can_differ(results: dict[str, Any]) -> None:
    """Gradient clipping to norm 1 and the value clip acted, tokens without a target exist, and updates moved the values."""
    first, second, third = results["one"]["steps"]
    assert first["grad_norm"] > 1.5
    assert 0 < third["critic/clip_share"] < 1
    assert first["targets"] < sum(len(v) for v in results["one"]["values"].values())
    assert second["critic/loss"] != pytest.approx(first["critic/loss"], rel=1e-3)
