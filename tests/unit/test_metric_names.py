"""docs/metrics.md knows every metric, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_rl.routing import agreement
from megatron_rl.telemetry.names import SECTIONS, MetricName, find_metric
from tests.unit.methods.cases import STACKS
from tests.unit.methods.packs import evaluate, random_batch, stack
from tests.unit.test_routing_agreement import GIVEN, LIVE, PROBS, REAL
from tools.metric_table import PAGE, page

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl"
SOURCES = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py") if file.name != "names.py")
ROWS = [row for _, rows in SECTIONS for row in rows]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python tools/metric_table.py > docs/metrics.md"


def test_names_are_found_and_others_are_not() -> None:
    assert find_metric("routing/exact/layer_07") is not None
    assert find_metric("routing/abs_d/flips_2-3") is not None and find_metric("routing/abs_d/flips_4+") is not None
    assert str(find_metric("seconds/old log-probs")).count("seconds/{phase}") == 1
    assert find_metric("seconds/step") != find_metric("seconds/update")
    assert find_metric("tis/kept_share_token") != find_metric("tis/kept_share")
    for name in ("routing/exact/", "reward", "made_up", "tis/made_up"):
        assert find_metric(name) is None


def test_no_name_is_told_twice() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "seconds/{phase}"], ids=lambda row: row.name)
def test_every_row_is_of_a_name_that_the_code_has(row: MetricName) -> None:
    """The last part of the name stands in the source of some module other than the table: a metric that goes takes its row along."""
    last = re.sub(r"\{\w+\}$", "", row.name.split("/")[-1])
    if row.name.startswith(("routing/exact/", "routing/overlap/", "routing/jaccard/")):
        last = "layer_"
    for end in ("_trained", "_replay", "_live"):  # suffixes are put together with an f-string
        last = last.removesuffix(end) if row.name.startswith("mismatch/") else last
    if row.name.startswith("routing") and last.startswith("load_violation"):
        last = "load_violation_"
    assert re.search(rf"\b_?{re.escape(last)}", SOURCES)


def test_agreement_has_only_known_names() -> None:
    counts, differs = agreement.compare(LIVE, GIVEN, PROBS.log(), REAL)
    for prefix, by_layer in (("routing", True), ("routing/replayed", False), ("routing/moved", False)):
        found = agreement.summary({0: counts, 1: counts}, prefix, by_layer=by_layer)
        assert [name for name in found if find_metric(name) is None] == []
        assert all(name.startswith(prefix + "/") for name in found)
    joined = agreement.by_flips([differs.float()], [torch.arange(4.0)])
    assert joined and all(find_metric(name) for name in joined)


def test_methods_log_only_known_names() -> None:
    """Every method that acts on the loss, in every mode."""
    found = {name for case in STACKS for name in evaluate(stack(*case), random_batch()).metrics}
    assert len(found) > 60
    assert sorted(name for name in found if find_metric(name) is None) == []
