"""Metric files, timers, what is shown while a run goes on, and the report."""

from __future__ import annotations

import io
import json
import math
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.page.figure import Figure
from megatron_rl.telemetry.charts import build_sections, thinned, trailing_mean
from megatron_rl.telemetry.headline import build_cards
from megatron_rl.telemetry.metrics import MetricWriter, read_metrics
from megatron_rl.telemetry.progress import Progress
from megatron_rl.telemetry.report import write_report
from megatron_rl.telemetry.sparkline import sparkline
from megatron_rl.telemetry.timers import Timers

STEP = {
    "reward/mean": 0.25,
    "response/length": 19.5,
    "mismatch/k3_replay": 2e-5,
    "mismatch/k3_live": 1e-3,
    "mismatch/max_abs_replay": 0.05,
    "mismatch/max_abs_live": 1.2,
    "routing/token_mismatch_share": 0.085,
    "tokens_per_second": 1190.0,
    "seconds/rollout": 1.5,
    "seconds/train": 0.5,
    "seconds/step": 2.25,
}


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, tensorboard=False)
    writer.write(1, {"reward/mean": 0.5})
    (row,) = read_metrics(tmp_path)  # before the writer is closed
    assert (row["step"], row["reward/mean"]) == (1, 0.5)
    assert 0 <= row["time"] < 60
    writer.close()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1e-4})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": math.nan if step == 2 else step})
    with MetricWriter(tmp_path, tensorboard=False, resume_step=3) as writer:
        assert steps(tmp_path) == [1, 2, 3]
        writer.write(4, {"loss": 40.0})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] == 40.0
    assert math.isnan(rows[1]["loss"])
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)


def test_time_goes_on_from_the_last_line_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 100.0}\n{"step": 2, "time": 200.0}\n')
    with MetricWriter(tmp_path, tensorboard=False, resume_step=1) as writer:
        writer.write(2, {})
    assert 100.0 <= read_metrics(tmp_path)[-1]["time"] < 150.0


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "ti')
    assert steps(tmp_path) == [1]
    with MetricWriter(tmp_path, tensorboard=False, resume_step=2) as writer:
        writer.write(2, {"loss": 1.0})
    assert steps(tmp_path) == [1, 2]
    path.write_text('{"step": 1, "ti\n{"step": 2, "time": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not JSON"):
        read_metrics(tmp_path)


def test_a_new_run_replaces_the_old_ones_file(tmp_path: Path) -> None:
    for _ in range(2):
        with MetricWriter(tmp_path, tensorboard=False) as writer:
            writer.write(1, {})
    assert steps(tmp_path) == [1]


def test_tensorboard_reads_what_was_written_and_not_what_a_resume_dropped(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": step / 4})
    time.sleep(1.1)  # event files are named and read by the second
    with MetricWriter(tmp_path, resume_step=2) as writer:
        writer.write(3, {"reward/mean": 10.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 10.0)]


def test_phases_add_up_and_an_inner_one_is_taken_out_of_the_outer() -> None:
    timers = Timers()
    began = time.perf_counter()
    with timers("outer"):
        time.sleep(0.05)
        for _ in range(2):
            with timers("inner"):
                time.sleep(0.05)
    whole = time.perf_counter() - began
    first = timers.drain()
    assert set(first) == {"seconds/outer", "seconds/inner"}
    assert first["seconds/inner"] >= 0.1  # two sleeps of 0.05 s
    assert 0.05 <= first["seconds/outer"] <= whole - first["seconds/inner"]
    assert timers.drain() == {}
    assert timers.totals == {"inner": first["seconds/inner"], "outer": first["seconds/outer"]}


def test_a_phase_that_raises_is_timed_and_ends() -> None:
    timers = Timers()
    with pytest.raises(KeyError), timers("rollout"):
        raise KeyError
    assert set(timers.drain()) == {"seconds/rollout"}


def test_timers_wait_for_the_device_at_both_ends() -> None:
    calls: list[str] = []
    with Timers(lambda: calls.append("wait"))("train"):
        calls.append("work")
    assert calls == ["wait", "work", "wait"]


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),  # eight equal steps, eight blocks
        ([0, 0, 7, 7], 2, "▁█"),  # pairs are averaged
        ([3, 3], 8, "▅▅"),  # flat: the middle
        ([0, math.nan, 1], 8, "▁ █"),
        ([], 8, ""),
        ([math.nan], 8, " "),
    ],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def shown(mode: str, *, terminal: bool, rank: int = 0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    with Progress(mode, 160, title="runs/x", rank=rank, console=console) as progress:  # type: ignore[arg-type]
        progress.note("a note")
        progress.update(7, STEP)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_a_step_is_one_line() -> None:
    lines = shown("auto", terminal=False).splitlines()
    assert lines[0] == "a note"
    (line,) = lines[1:]
    for part in ("step 7/160", "reward 0.250", "k3 2.0e-05", "k3 live 1.0e-03", "routed otherwise 8.5%", "tok/s 1,190", "rollout 1.50s"):
        assert part in line


def test_on_a_terminal_the_panel_shows_every_number() -> None:
    text = shown("auto", terminal=True)
    for part in ("runs/x", "step 7/160", "0.250", "▅", "19.5 tokens", "2.00e-05", "1.00e-03", "1.2", "8.50% of tokens", "1,190", "2.25 s"):
        assert part in text


@pytest.mark.parametrize(("mode", "rank"), [("none", 0), ("rich", 1), ("plain", 3)])
def test_other_ranks_and_mode_none_show_nothing(mode: str, rank: int) -> None:
    assert shown(mode, terminal=True, rank=rank) == ""


def test_a_supervised_run_shows_its_loss_and_no_reward() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Progress("rich", 10, console=console) as progress:
        progress.update(1, {"loss": 1.5, "seconds/step": 0.1})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.5000" in text
    assert "reward" not in text


def test_trailing_mean_leaves_out_what_is_missing() -> None:
    assert trailing_mean([1.0, 3.0, None, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert trailing_mean([None], 2) == [None]


def figures(rows: list[dict[str, float]]) -> dict[str, Figure]:
    return {item.title: item for section in build_sections(rows) for item in section.items if isinstance(item, Figure)}


def test_charts_show_each_metric_once_and_sum_the_phases_to_the_step() -> None:
    rows = [{"step": 0, "time": 0.0, "eval/pass_rate": 0.2}, {"step": 1, "time": 3.0, **STEP, "odd/one": 1.0, "trm/kept_share": 0.9}]
    sections = {section.title: [item.title for item in section.items] for section in build_sections(rows)}
    assert sections == {
        "Outcome": ["Reward", "Response length"],
        "Mismatch of trainer and engine": ["Mismatch, k3", "Largest |d|"],
        "Routing": ["Routed otherwise"],
        "Acceptance": ["Kept"],
        "Time": ["Seconds a step, by stage", "Throughput"],
        "Every other metric": ["odd/one"],
    }
    assert build_sections(rows)[-1].folded
    charts = figures(rows)
    assert charts["Mismatch, k3"].y.log
    phases = {series.name: series.y[0] for series in charts["Seconds a step, by stage"].series}
    # 2.25 s a step less 1.5 and 0.5.
    assert phases == {"rollout": 1.5, "train": 0.5, "other": 0.25}


def test_layers_are_drawn_by_their_number_as_the_share_that_differs() -> None:
    rows = [{"step": step, "time": 1.0, "routing/exact/layer_01": 1 - 0.1 * step, "routing/exact/layer_00": 1.0} for step in range(1, 5)]
    (bars,) = figures(rows)["Flips by layer"].series
    assert list(bars.x) == ["0", "1"]
    # The last quarter of four steps is step 4.
    assert bars.y == pytest.approx([0.0, 0.4])


def test_a_long_run_is_drawn_with_few_points_and_no_spike_is_lost() -> None:
    x, y = list(range(20_000)), [1.0] * 20_000
    y[777], y[15_001], y[9_000] = 50.0, -50.0, None  # type: ignore[call-overload]
    few_x, few_y = thinned(x, y, 400)
    assert len(few_x) <= 400 + 1
    assert few_x == sorted(few_x)
    kept = dict(zip(few_x, few_y, strict=True))
    assert (kept[777], kept[15_001], kept[9_000]) == (50.0, -50.0, None)
    assert thinned([1.0], [2.0]) == ([1.0], [2.0])


def test_headline_takes_the_summary_and_falls_back_to_the_metrics() -> None:
    rows = [
        {"step": 0, "time": 0.0, "eval/pass_rate": 0.25},
        {"step": 1, "time": 62.0, **STEP},
        {"step": 1, "time": 63.0, "eval/pass_rate": 0.5},
    ]
    cards = {card.label: card for card in build_cards({}, rows)}
    assert (cards["Held-out pass rate"].value, cards["Held-out pass rate"].detail) == ("0.250 → 0.500", "+0.250")
    assert cards["Mismatch, k3, replayed"].detail == "0.00100 routed live: 50.0 times"
    assert cards["Wall clock"].value == "1 min 03 s"
    assert "Export" not in cards
    better = {card.label: card for card in build_cards({"pass_rate_before": 0.3, "pass_rate_after": 0.2, "export_matches": False}, rows)}
    assert (better["Held-out pass rate"].detail, better["Held-out pass rate"].tone) == ("-0.100", "bad")
    assert better["Export"].value == "differs"


def test_the_report_is_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a<b"
    with MetricWriter(folder, tensorboard=False) as writer:
        writer.write(1, {**STEP, "loss": math.nan, "grpo/</script>": 1.0})
    (folder / "summary.json").write_text(json.dumps({"seed": 0, "sglang": "0.5.23", "seconds_by_phase": {"rollout": 1.5}}))
    page = write_report(folder).read_text()
    assert "<title>a&lt;b · megatron_rl</title>" in page
    assert not re.search(r"(src|href)=[\"'](?!data:|#)", page)
    assert page.count("</script>") == 2  # data and script: a metric's name cannot close one
    data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))  # type: ignore[union-attr]
    assert next(iter(data.values()))["title"] == "Reward"
    assert data["loss"]["series"][0]["y"] == [None]
    assert "<dt>seconds_by_phase.rollout</dt><dd>1.500</dd>" in page
    assert (folder / "csv" / "mismatch_k3.csv").read_text() == "series,step,nats\nroutes replayed,1,2e-05\nrouted live,1,0.001\n"
    assert len(page) < 100_000


def test_a_run_without_metrics_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no such file; give the logging\.dir of a run"):
        write_report(tmp_path)
    MetricWriter(tmp_path, tensorboard=False).close()
    with pytest.raises(ValueError, match="there is nothing to report before the first step"):
        write_report(tmp_path)
