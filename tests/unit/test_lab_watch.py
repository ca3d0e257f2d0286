"""`lab watch`: a file that grows under it, when a run has ended, and what it warns of."""

from __future__ import annotations

import io
import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli import main
from megatron_rl.lab.alarms import RECENT, alarms
from megatron_rl.lab.watch import Follower, panel, watch

Rows = list[dict[str, float]]


def line(step: int, **values: float | None) -> str:
    return json.dumps({"step": step, "time": float(step), **{name.replace("__", "/"): value for name, value in values.items()}}) + "\n"


def run_with(folder: Path, *lines: str) -> Path:
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def shown(follower: Follower, width: int = 90) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel(follower, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_line_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.update() == []  # no file yet
    path = tmp_path / "metrics.jsonl"
    second = line(2, loss=None)
    path.write_text(line(1, loss=0.5) + second[:9])
    assert [row["step"] for row in follower.update()] == [1]
    assert follower.update() == []
    with path.open("a") as file:
        file.write(second[9:] + line(3)[:-1])
    (new,) = follower.update()
    assert new["step"] == 2
    assert math.isnan(new["loss"])
    assert [row["step"] for row in follower.rows] == [1, 2]


def test_a_resumed_run_is_read_from_its_start(tmp_path: Path) -> None:
    follower = Follower(run_with(tmp_path, *(line(step) for step in range(1, 6))))
    follower.update()
    run_with(tmp_path, line(1), line(2))
    assert [row["step"] for row in follower.update()] == [1, 2]
    assert [row["step"] for row in follower.rows] == [1, 2]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"b'nonsense' is not JSON .*remove the line"):
        Follower(run_with(tmp_path, "nonsense\n")).update()


def test_a_run_has_ended_when_its_summary_is_newer_than_its_metrics(tmp_path: Path) -> None:
    follower = Follower(run_with(tmp_path, line(1)))
    follower.update()
    assert not follower.ended
    summary = tmp_path / "summary.json"
    summary.write_text("{}")
    os.utime(tmp_path / "metrics.jsonl", (100, 100))
    os.utime(summary, (100, 100))
    assert follower.ended
    os.utime(tmp_path / "metrics.jsonl", (101, 101))  # resumed: an older run's summary
    assert not follower.ended


def test_a_run_that_stands_still_is_told_by_its_own_pace(tmp_path: Path) -> None:
    follower = Follower(run_with(tmp_path, line(1, seconds__step=60.0)))
    follower.update()
    os.utime(tmp_path / "metrics.jsonl", (1000, 1000))
    assert follower.standing(1000 + 599) is None  # ten steps of a minute
    assert follower.standing(1000 + 601) == 601


def test_the_panel_shows_newest_values_and_their_course(tmp_path: Path) -> None:
    rows = [line(step, reward__mean=step / 10, mismatch__k3_live=2e-5, trm__kept_share=0.975) for step in range(1, 9)]
    follower = Follower(run_with(tmp_path, *rows))
    assert "waiting for the first step" in shown(follower)
    follower.update()
    text = shown(follower)
    for part in (
        "step 8 · 0 min 08 s of running · running",
        "0.800  ▁▂▃▄▅▆▇█",
        "k3, routed live",
        "2.00×10⁻⁵",
        "trm: kept share",
        "97.5\u202f%",
    ):
        assert part in text
    assert "!" not in text


def course(name: str, before: float, now: float) -> Rows:
    return [{"step": step, "time": 0.0, name: before if step < RECENT else now} for step in range(2 * RECENT)]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (course("loss", 0.1, math.nan), f"loss is not finite since step {RECENT}"),
        (course("mismatch/k3_trained", 1e-4, 4e-4), "mismatch rises: mismatch/k3_trained is 4.00×10⁻⁴, 1.00×10⁻⁴ before"),
        (course("mismatch/k3_trained", 0.1, 0.1), "trainer and engine are far apart"),
        (course("routing/token_mismatch_share", 0.02, 0.05), "more tokens are routed otherwise"),
        (course("entropy", 1.0, 0.1), "entropy collapses"),
        (course("response/length", 100.0, 210.0), "answers grow longer"),
        (course("mis/kept_share", 0.9, 0.3), "little is left to train on: mis/kept_share is 30.0\u202f%"),
        (course("routing/unreplayable_share", 0.0, 0.25), "25.0\u202f% of routes cannot be replayed"),
        ([{"step": 1, "time": 0.0, "mismatch/k3_replay": 3e-4, "mismatch/k3_live": 1e-4}], "are they the right rows?"),
    ],
)
def test_an_alarm(rows: Rows, says: str) -> None:
    (alarm,) = alarms(rows)
    assert says in alarm.text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        course("mismatch/k3_trained", 1e-4, 2.9e-4),  # rises, but not threefold
        course("mismatch/k3_trained", 1e-9, 9e-7),  # too small to matter
        course("mismatch/k3_trained", 1e-4, 4e-4)[: 2 * RECENT - 1],  # too little to compare with
        course("loss", math.nan, 0.1),  # over
        course("entropy", 0.1, 1.0),
        course("grpo/clip_share_low", 0.0, 0.3),
        [{"step": 1, "time": 0.0, "mismatch/k3_replay": 1e-5, "mismatch/k3_live": 1e-4}],
    ],
)
def test_no_alarm(rows: Rows) -> None:
    assert alarms(rows) == []


def test_once_exits_by_the_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run_with(tmp_path, line(1, loss=0.5)))
    assert main(["lab", "watch", folder, "--once"]) == 0
    assert "loss" in capsys.readouterr().out
    run_with(tmp_path, line(1, loss=None))
    assert main(["lab", "watch", folder, "--once"]) == 1
    assert "loss is not finite since step 1" in capsys.readouterr().out
    run_with(tmp_path)
    assert main(["lab", "watch", folder, "--once"]) == 2
    assert main(["lab", "watch", str(tmp_path / "none")]) == 2
    assert main(["lab", "watch", folder, "--interval", "0"]) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_it_follows_a_run_that_writes_and_leaves_when_it_ends(tmp_path: Path, terminal: bool) -> None:
    def train() -> None:
        for step in range(1, 4):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                text = line(step, reward__mean=0.25 * step)
                for part in (text[:7], text[7:]):  # a reader sees half a line now and then
                    file.write(part)
                    file.flush()
                    time.sleep(0.02)
        (tmp_path / "summary.json").write_text("{}")

    console = Console(file=io.StringIO(), force_terminal=terminal, width=90, color_system=None)
    writer = threading.Thread(target=train)
    writer.start()
    assert watch(tmp_path, interval=0.01, console=console) == 0
    writer.join()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3" in text
    assert "0 min 03 s of running · ended" in text
    assert "0.750" in text  # 3 steps of 0.25
