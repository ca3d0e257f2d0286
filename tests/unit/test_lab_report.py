"""The laboratory's report: what is on the page for a known measurement, and that its data are the measurement's."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab_cases import LAYERS, made_up_measurement

from megatron_rl.cli import main
from megatron_rl.lab.records import Measurement
from megatron_rl.lab.report import write_report
from megatron_rl.lab.report.causes import PARTS
from megatron_rl.lab.report.view import View
from megatron_rl.lab.report.write import report_page
from megatron_rl.lab.summary import summarise
from megatron_rl.page.figure import Figure, Page, Table
from megatron_rl.telemetry.metrics import MetricWriter


@pytest.fixture(scope="module")
def measured() -> tuple[Measurement, dict[str, Any]]:
    measurement = made_up_measurement()
    return measurement, summarise(measurement)


@pytest.fixture(scope="module")
def written(measured: tuple[Measurement, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(*measured, tmp_path_factory.mktemp("report"))


def items(page: Page) -> dict[str, Figure | Table]:
    return {item.key: item for section in page.sections for item in section.items}


def rows_of(report: Path, key: str) -> list[dict[str, str]]:
    with (report.parent / "csv" / f"{key}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_part_of_the_issue_is_on_the_page(measured: tuple[Measurement, dict[str, Any]]) -> None:
    page = report_page(*measured)
    titles = [section.title for section in page.sections]
    assert titles == [
        "How large the gap is",
        "Tokens: the log-ratio and its tails",
        "What the gap is made of",
        "Where routing flips",
        "Sequences: prefix drift",
        "Bounds",
        "What each method would do to this batch",
        "What each method would do under other conditions",
        "The same for engine bf16 int8",
    ]
    keys = set(items(page))
    assert {
        "k3_by_condition",
        "conditions",
        "floors",
        "histogram",
        "tails",
        "law_live",
        "law_r3",
        "attribution_variance_share",
        "attribution_tail_share",
        "flips_by_layer",
        "removed_by_layer",
        "flips_by_margin",
        "drift_live_lag_2",
        "growth",
        "lengths",
        "bounds_live_lag_2",
        "certificates",
        "methods_live_lag_2",
        "engine1_histogram",
    } <= keys
    assert all(item.note for item in items(page).values()), "every figure says how to read it"


def test_the_headline_has_the_floor_beside_each_number(measured: tuple[Measurement, dict[str, Any]]) -> None:
    cards = {card.label: card for card in report_page(*measured).cards}
    # The worst of the made-up floor: k3 2e-5, max |d| 60 times that.
    for label in ("Mean k3, routed live", "Mean k3, routes replayed"):
        assert cards[label].detail == "floor 2.00×10⁻⁵"
    assert cards["Largest |d|, routed live"].detail == "floor 0.00120"
    live = measured[1]["engines"]["bf16"]["conditions"]["live"]
    assert cards["Tokens routed otherwise"].value == f"{100 * live['route_mismatch_share']:.1f}\u202f%"


def test_the_histogram_counts_every_token_once(measured: tuple[Measurement, dict[str, Any]], written: Path) -> None:
    measurement, _ = measured
    tokens = int(measurement.main.batch.mask_T.sum())
    for condition in ("live", "R3"):
        rows = [row for row in rows_of(written, "histogram") if row["series"] == condition]
        assert sum(float(row["tokens"] or 0) for row in rows) == tokens
    steps = np.diff([float(row["d_nats"]) for row in rows])
    assert steps == pytest.approx(steps[0], rel=1e-6)


def test_the_tails_are_the_shares_beyond(measured: tuple[Measurement, dict[str, Any]], written: Path) -> None:
    measurement, summary = measured
    view = View(measurement.main, summary["engines"]["bf16"])
    size = np.abs(view.log_ratios("live"))
    rows = [row for row in rows_of(written, "tails") if row["series"] == "live" and row["share_of_tokens"]]
    for row in rows[::10]:
        # fp64 against nine digits: a token may lie on the edge.
        assert abs(float(row["share_of_tokens"]) - float((size >= float(row["d_nats"])).mean())) <= 1 / len(size) + 1e-9


def test_the_cloud_keeps_the_largest_tokens(written: Path, measured: tuple[Measurement, dict[str, Any]]) -> None:
    rows = [row for row in rows_of(written, "law_live") if row["series"] == "tokens"]
    largest = measured[1]["engines"]["bf16"]["conditions"]["live"]["max_abs_d"]
    assert max(float(row["d_nats"]) for row in rows) == pytest.approx(largest, rel=1e-6)
    assert len(rows) <= 900


def test_attribution_and_layers_are_the_summarys(written: Path, measured: tuple[Measurement, dict[str, Any]]) -> None:
    engine = measured[1]["engines"]["bf16"]
    orders = engine["conditions"]["live, lag 2"]["attribution"]["orders"]
    rows = rows_of(written, "attribution_variance_share")
    assert len(rows) == 2 * 3
    assert [float(row["share"]) for row in rows] == pytest.approx(
        [one["variance_share"][part] for one in orders for part in PARTS], rel=1e-6
    )
    flips = rows_of(written, "flips_by_layer")
    assert [row["moe_layer_from_0"] for row in flips] == [str(layer) for layer in range(LAYERS)]
    assert [float(row["share"]) for row in flips] == pytest.approx([layer["flip_share"] for layer in engine["layers"]], rel=1e-6)


def test_every_method_has_a_row(written: Path, measured: tuple[Measurement, dict[str, Any]]) -> None:
    methods = measured[1]["engines"]["bf16"]["trained"]["live, lag 2"]["methods"]
    rows = rows_of(written, "methods_live_lag_2")
    assert [row["method"] for row in rows] == [method["method"] for method in methods]
    lacking = {row["method"] for row in rows if row["not_shown_for_want_of"]}
    assert lacking == {method["method"] for method in methods if "missing" in method}


def test_the_page_is_one_small_file_without_network(written: Path) -> None:
    text = written.read_text()
    assert not re.search(r"(src|href|action)=[\"'](?!data:|#)", text)
    assert len(text) < 1_500_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))  # type: ignore[union-attr]
    assert set(data) == set(re.findall(r'data-figure="([^"]+)"', text))


def test_the_same_measurement_gives_the_same_page(measured: tuple[Measurement, dict[str, Any]], written: Path, tmp_path: Path) -> None:
    assert write_report(*measured, tmp_path).read_text() == written.read_text()


def test_a_dense_model_without_floor_or_candidates_has_a_report(measured: tuple[Measurement, dict[str, Any]], tmp_path: Path) -> None:
    sample = measured[0].main
    batch = dataclasses.replace(sample.batch, routes_TLK=None)
    alone = dataclasses.replace(sample.rescored["live"], routes_TLK=None, margin_TL=None)
    dense = Measurement({"bf16": dataclasses.replace(sample, batch=batch, rescored={"live": alone})})
    page = report_page(dense, summarise(dense))
    assert "Where routing flips" not in [section.title for section in page.sections]
    assert {card.label: card.detail for card in page.cards}["Mean k3"] == "no floor measured"
    assert write_report(dense, summarise(dense), tmp_path).is_file()


def test_an_engine_that_agrees_exactly_has_a_report(measured: tuple[Measurement, dict[str, Any]], tmp_path: Path) -> None:
    sample = measured[0].main
    same = {name: dataclasses.replace(sample.rescored[name], logp_T=sample.batch.mu_T) for name in ("live", "R3")}
    exact = Measurement({"bf16": dataclasses.replace(sample, rescored=same)})
    text = write_report(exact, summarise(exact), tmp_path).read_text()
    assert "not certified" in text  # L' = 0 is not above B* = 0


def test_a_runs_metrics_become_the_timeline(measured: tuple[Measurement, dict[str, Any]], tmp_path: Path) -> None:
    with MetricWriter(tmp_path / "run", tensorboard=False) as writer:
        for step in (1, 2):
            writer.write(step, {"mismatch/k3_live": 1e-4 * step, "reward/mean": 0.5, "mis/kept_share": 0.9})
    found = items(report_page(*measured, tmp_path / "run"))
    assert {"run_reward", "run_kept"} <= set(found)
    k3 = found["run_mismatch_k3"]
    assert isinstance(k3, Figure)
    assert [(s.name, list(s.x), list(s.y)) for s in k3.series] == [("routed live", [1, 2], [1e-4, 2e-4]), ("floor", [1, 2], [2e-5, 2e-5])]


def test_lab_report_writes_a_measurements_page_again(
    measured: tuple[Measurement, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = measured[0].main
    small = Measurement({"bf16": dataclasses.replace(sample, rescored={"live": sample.rescored["live"]})}, {}, {"model": "small"})
    small.save(tmp_path)
    assert main(["lab", "report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    again = write_report(small, summarise(small), tmp_path / "again.html")
    assert (tmp_path / "report.html").read_text() == again.read_text()
    assert main(["lab", "report", str(tmp_path / "nothing")]) == 2
    assert "give the --out of `megatron-rl lab measure`" in capsys.readouterr().err
