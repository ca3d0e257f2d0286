"""Every kind of parallelism gives one process's loss, statistics, gradient norm and weights, whatever the method.

The pairwise covering of `tools/layouts/matrix.py`; `python tools/check_layouts.py` runs the full matrix.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tools.layouts.compare import BOUND, largest, relative
from tools.layouts.matrix import LAYOUTS, METHODS, RECOMPUTE, SPECIAL, Case, oracle, quick

pytestmark = pytest.mark.timeout(900)  # the first test waits for all runs: 2 minutes on two idle cores

CASES = quick()
DECISIVE = {
    "grpo": "grpo/clip_share_high", "ppo": "ppo/clip_share_low", "minpro": "minpro/clip_share_high", "ctpo": "ctpo/clip_share_low",
    "cppo": "cppo/masked_share", "gspo": "gspo/clip_share_high", "gmpo": "gmpo/clip_share", "trm": "trm/kept_share",
    "sorl": "sorl/clip_share", "acpo_adaptive": "acpo_adaptive/clip_share", "dvp": "dvp/outside_share", "sis": "sis/accepted_share",
    "dppo top_k_tv": "dppo/masked_share_positive", "cppo top_k_tv old": "cppo/masked_share", "rspo": "rspo/clip_share",
    "dvp suffix": "dvp/kept_share", "trm exact": "trm/kept_share", "nfpo": "nfpo/masked_share",
}  # fmt: skip
"""The share of tokens on which a method does what it is for."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(runs: dict[str, Any], case: Case) -> None:
    expected, found = runs[oracle(case.method).name], runs[case.name]
    difference = largest(expected, found)
    # 1e-5 is fp32's order of summation; measured differences are below 1e-6.
    assert difference.size <= BOUND, difference
    # A share counts decisions: one token decided otherwise is 1/102 of it, not a matter of rounding.
    shares = [name for name in expected["statistics"] if name.endswith("_share") or "clip_share" in name]
    assert [found["statistics"][n] for n in shares] == pytest.approx([expected["statistics"][n] for n in shares], rel=1e-12)


@pytest.mark.parametrize("method", DECISIVE)
def test_the_decisive_branch_acts_on_some_tokens_only(runs: dict[str, Any], method: str) -> None:
    """A comparison of clips says nothing where nothing or everything is clipped."""
    assert 0 < runs[oracle(method).name]["statistics"][DECISIVE[method]] < 1


def test_methods_differ_from_each_other(runs: dict[str, Any]) -> None:
    """No method is silently replaced by another: each pair differs in loss or gradient, by far more than the bound."""
    found = [(runs[oracle(m).name]["statistics"]["loss"], runs[oracle(m).name]["statistics"]["grad_norm"]) for m in METHODS | SPECIAL]
    assert min(max(relative(a, b) for a, b in zip(*pair, strict=True)) for pair in combinations(found, 2)) > 10 * BOUND


def test_router_shift_and_reference_are_seen(runs: dict[str, Any]) -> None:
    """Routers move between the two steps, and a reference of other weights is some nats away."""
    assert runs[oracle("rspo").name]["statistics"]["rspo/trust_mean"] < 0.999
    assert runs[oracle("kl_penalty").name]["statistics"]["kl_penalty/kl"] > 0.01


def test_sorl_divides_by_what_the_clip_took_away(runs: dict[str, Any]) -> None:
    """The second step clips, so the divisor is the norm of that gradient, above its floor of 1."""
    assert runs[oracle("sorl").name]["statistics"]["clipped_gradient_norm"] > 1


def test_the_covering_covers() -> None:
    """Every method meets every split (but how an expert is cut), every layout a method; recomputation meets every split."""
    traits = frozenset().union(*(layout.traits for layout in LAYOUTS.values()))

    def met(cases: list[Case]) -> frozenset[str]:
        return frozenset().union(*(case.where.traits for case in cases))

    for method in METHODS:
        assert met([c for c in CASES if c.method == method]) >= traits - {"expert_tensor"}, method
    for kind in RECOMPUTE:
        assert met([c for c in CASES if c.recompute == kind]) >= traits - {"expert_tensor"}, kind
    for method in SPECIAL:
        assert {"TP2xEP2", "CP2"} <= {c.layout for c in CASES if c.method == method}
    assert {c.layout for c in CASES} == set(LAYOUTS)


def test_a_missing_statistic_differs() -> None:
    one = {"statistics": {"loss": 1.0, "clip_share": 0.5}, "weights": {}, "logp": {"0/0": [1.0, 2.0]}}
    assert largest(one, one).size == 0
    assert largest(one, one | {"statistics": {"loss": 1.0}}).size == float("inf")
    assert largest(one, one | {"logp": {"0/0": [1.0]}}).size == float("inf")
    assert largest(one, one | {"logp": {"0/0": [1.0, 2.2]}}).size == pytest.approx(0.1)
    assert relative(0.0, 1e-9) == pytest.approx(1e-6)  # held against 1e-3
