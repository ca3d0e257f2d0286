"""Both reports in headless Chromium: they load without network and without an error, figures are drawn, tables sort."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from lab_cases import LAYERS, made_up_measurement

from megatron_rl.lab.records import Measurement
from megatron_rl.lab.report import write_report as write_lab_report
from megatron_rl.lab.summary import summarise
from megatron_rl.telemetry.metrics import MetricWriter
from megatron_rl.telemetry.report import write_report as write_training_report
from tests.browser.opening import Opened, opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with MetricWriter(folder, tensorboard=False) as writer:
        for step in range(1, 31):
            values = {
                "reward/mean": step / 40,
                "loss": float("nan") if step == 7 else 1 / step,
                "seconds/step": 2.0,
                "seconds/rollout": 1.5,
            }
            writer.write(step, {**values, "mismatch/k3_live": 1e-4 * step, "odd/one": 0.0})
    return folder


@pytest.fixture(scope="module")
def lab(browser: Any, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    sample = made_up_measurement(trajectories=12, longest=24).main
    names = ("live", "R3", "live, lag 2", "R3, lag 2")
    measurement = Measurement({"bf16": dataclasses.replace(sample, rescored={name: sample.rescored[name] for name in names})})
    return opened(browser, write_lab_report(measurement, summarise(measurement), tmp_path_factory.mktemp("lab"), run))


@pytest.fixture(scope="module")
def training(browser: Any, run: Path) -> Opened:
    return opened(browser, write_training_report(run), "dark", 390)


@pytest.fixture(params=["lab", "training"])
def report(request: pytest.FixtureRequest) -> Opened:
    return request.getfixturevalue(request.param)


def test_it_loads_without_network_and_without_an_error(report: Opened) -> None:
    assert report.complaints == []
    assert [url for url in report.requests if not url.startswith("data:")] == [report.file.as_uri()]


def test_every_figure_is_drawn_inside_its_frame(report: Opened) -> None:
    drawn = report.page.evaluate("""[...document.querySelectorAll('.plot')].map(plot => {
        const frame = plot.querySelector('svg[role=img]').getBoundingClientRect(), marks = plot.querySelector('.marks');
        const box = marks.getBoundingClientRect();
        const reach = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
        return { key: plot.dataset.figure, marks: marks.childElementCount, ticks: plot.querySelectorAll('.axes text').length,
                 wrong: /NaN|Infinity|undefined/.test(plot.innerHTML),
                 inside: reach.every(pixels => pixels <= 1) };
    })""")
    assert len(drawn) == report.page.locator("[data-figure]").count() >= 5
    bad = [one for one in drawn if not one["marks"] or one["ticks"] < 3 or one["wrong"] or not one["inside"]]
    assert bad == []


def test_nothing_is_wider_than_the_window(report: Opened) -> None:
    assert report.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_table_sorts_both_ways_and_what_is_missing_stays_last(lab: Opened) -> None:
    table = lab.page.locator("#methods_live_lag_2 table")
    head = table.locator("th", has_text="Effective tokens")
    column = head.evaluate("cell => cell.cellIndex")

    def values() -> list[str]:
        return table.locator("tbody tr").evaluate_all(f"rows => rows.map(row => row.cells[{column}].dataset.value)")

    before = sorted(values())
    for order, flip in (("descending", True), ("ascending", False)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        found = values()
        numbers = [float(value) for value in found if value]
        assert numbers == sorted(numbers, reverse=flip)
        assert found[len(numbers) :] == [""] * (len(found) - len(numbers))
        assert sorted(found) == before
    table.locator("th", has_text="Method").locator("button").click()
    assert head.get_attribute("aria-sort") == "none"
    names = table.locator("tbody td:first-child").all_inner_texts()
    assert names == sorted(names)


def test_pointing_at_a_figure_reads_its_values(lab: Opened) -> None:
    plot = lab.page.locator("[data-figure=flips_by_layer]")
    tip = plot.locator(".tip")
    assert tip.is_hidden()
    plot.locator("svg[role=img]").hover()
    assert "MoE layer" in tip.inner_text()
    assert "%" in tip.inner_text()
    lab.page.mouse.move(0, 0)
    assert tip.is_hidden()
    plot.locator("svg[role=img]").focus()
    for _ in range(LAYERS):
        lab.page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("MoE layer, from 0 0")
    lab.page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("MoE layer, from 0 1")


def test_a_figure_of_rows_reads_a_row(lab: Opened) -> None:
    plot = lab.page.locator("[data-figure=k3_by_condition]")
    for _ in range(2):
        plot.locator("svg[role=img]").press("ArrowDown")
    assert plot.locator(".tip").inner_text().startswith("R3\n")  # the second condition


def test_a_series_can_be_hidden_and_shown(lab: Opened) -> None:
    plot = lab.page.locator("[data-figure=histogram]")
    key = plot.locator(".legend button").first
    assert plot.locator(".marks path").count() == 2
    key.click()
    assert (key.get_attribute("aria-pressed"), plot.locator(".marks path").count()) == ("false", 1)
    key.click()
    assert plot.locator(".marks path").count() == 2


def test_the_csv_link_gives_the_file(lab: Opened) -> None:
    link = lab.page.locator("#histogram a.csv")
    kind, _, text = link.get_attribute("href").partition(",")
    assert kind == "data:text/csv;charset=utf-8"
    assert unquote(text) == (lab.file.parent / "csv" / link.get_attribute("download")).read_text()


def test_the_theme_follows_the_system_and_the_button(training: Opened) -> None:
    def background() -> str:
        return training.page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark, button = background(), training.page.locator("#theme")
    assert button.inner_text() == "Light"
    button.click()
    assert background() == "rgb(255, 255, 255)" != dark
    button.click()
    assert background() == dark


def test_on_paper_it_is_white_and_keeps_to_the_page(lab: Opened) -> None:
    lab.page.emulate_media(media="print")
    lab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert lab.page.locator("nav").is_hidden()
    assert lab.page.locator("#histogram svg[role=img]").get_attribute("viewBox").startswith("0 0 334 ")
    assert lab.page.locator("#growth svg[role=img]").get_attribute("viewBox").startswith("0 0 690 ")
    assert lab.page.pdf(format="A4").startswith(b"%PDF")
    lab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    lab.page.emulate_media(media="screen")
