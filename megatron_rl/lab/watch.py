"""`megatron-rl lab watch`: a run's newest metrics, their course, and what is wrong with them, in the terminal, while the run writes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..page.numbers import number, percent
from ..telemetry.metrics import METRICS_FILE
from ..telemetry.progress import Progress
from ..telemetry.report import SUMMARY_FILE
from ..telemetry.sparkline import sparkline
from .alarms import Alarm, alarms, column, matching

STALE = 120.0
"""Seconds without a new line, and as many times ten steps, after which a run that has not ended is said to stand still."""
HISTORY = 2000
"""Lines that the curves and alarms look back on."""
SHOWN = (
    ("reward/mean", "reward", "number"),
    ("eval/pass_rate", "held-out pass rate", "number"),
    ("loss", "loss", "number"),
    ("mismatch/k3_trained", "k3, as trained", "number"),
    ("mismatch/k3_replay", "k3, routes replayed", "number"),
    ("mismatch/k3_live", "k3, routed live", "number"),
    ("mismatch/max_abs_replay", "max |d|, routes replayed", "number"),
    ("mismatch/max_abs_live", "max |d|, routed live", "number"),
    ("routing/token_mismatch_share", "tokens routed otherwise", "percent"),
    ("entropy", "entropy", "number"),
    ("response/length", "response length", "number"),
    ("grad_norm", "gradient norm", "number"),
    ("lr", "learning rate", "number"),
    ("tokens_per_second", "tokens a second", "number"),
    ("seconds/step", "seconds a step", "number"),
)
"""(metric, label, how it reads), in the order of the panel."""
KEPT = ("kept_share", "accepted", "effective_share", "clip_share", "masked_share")
"""Parts of the names of methods' metrics that are shown too."""


class Follower:
    """The rows of a metrics.jsonl that grows: each call takes what is new, and leaves a line alone that is not whole yet."""

    def __init__(self, run: str | Path) -> None:
        """Raises ValueError unless `run` is a folder."""
        self.folder = Path(run)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder}: no such folder; give the logging.dir of a run")
        self.path = self.folder / METRICS_FILE
        self.rows: list[dict[str, Any]] = []
        self._read = 0

    def update(self) -> list[dict[str, Any]]:
        """The rows that came since the last call. A file that shrank (a resumed run, a new one) is read from its start.

        Raises:
            ValueError: a whole line is not JSON.
        """
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < self._read:
            self.rows, self._read = [], 0
        if size == self._read:
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read(size - self._read)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [self._row(line) for line in whole.splitlines()]
        self.rows += new
        return new

    def _row(self, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}: {line[:60]!r} is not JSON ({error}); remove the line") from error
        return {name: math.nan if value is None else value for name, value in row.items()}

    @property
    def ended(self) -> bool:
        """Whether the run wrote its summary.json, which it does after its last step."""
        summary = self.folder / SUMMARY_FILE
        return bool(self.rows) and summary.is_file() and summary.stat().st_mtime_ns >= self.path.stat().st_mtime_ns

    def standing(self, now: float) -> float | None:
        """Seconds without a new line at the time `now`, where that is long for this run and it has not ended."""
        if not self.rows or self.ended:
            return None
        age = now - self.path.stat().st_mtime
        steps = column(self.rows, "seconds/step")
        return age if age > max(STALE, 10 * median(steps) if steps else 0.0) else None


def watch(run: str | Path, *, once: bool = False, interval: float = 2.0, console: Console | None = None) -> int:
    """Shows the run until it ends or the reader interrupts.

    Args:
        run: its logging.dir; metrics.jsonl may still be missing.
        once: show what there is and return.
        interval: seconds between looks at the file.
        console: where to show it; standard output otherwise. One that is no terminal gets a line for a step instead of the panel.

    Returns:
        0; with `once`, 1 when there are alarms.

    Raises:
        ValueError: there is no such folder, or with `once` no metrics in it, or a line is broken.
    """
    if not interval > 0:
        raise ValueError(f"interval: {interval} must be above 0 seconds")
    follower, console = Follower(run), console or Console()
    follower.update()
    if once:
        if not follower.rows:
            raise ValueError(f"{follower.path}: no whole line yet; leave out --once to wait for the first step")
        console.print(panel(follower, console.width))
        return int(bool(warnings(follower)))
    if console.is_terminal:
        _follow_live(follower, interval, console)
    else:
        _follow_plain(follower, interval, console)
    return 0


def _follow_live(follower: Follower, interval: float, console: Console) -> None:
    with Live(panel(follower, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for _ in _looks(follower, interval):
            live.update(panel(follower, console.width), refresh=True)


def _follow_plain(follower: Follower, interval: float, console: Console) -> None:
    """A line now and then, one for each alarm when it first goes off, and one at the end."""
    known: set[str] = set()
    with Progress("plain", 0, console=console) as progress:
        for new in _looks(follower, interval):
            for row in new:
                progress.update(row["step"], _metrics(row))
            for alarm in warnings(follower):
                if alarm.kind not in known:
                    known.add(alarm.kind)
                    progress.note(f"! {alarm.text}")
        progress.note(f"{progress.line(_metrics(follower.rows[-1]))} · {_minutes(follower.rows[-1]['time'])} of running · ended")


def _looks(follower: Follower, interval: float) -> Iterator[list[dict[str, Any]]]:
    """The newest rows, again and again until the run has ended; at first only the last of those that are there."""
    yield follower.rows[-1:]
    while True:
        ended = follower.ended  # asked first, so that its last line is read
        yield follower.update()
        if ended:
            return
        time.sleep(interval)


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in ("step", "time")}


def warnings(follower: Follower) -> list[Alarm]:
    """The alarms of the metrics, and of a file that no longer grows."""
    standing = follower.standing(time.time())
    still = [] if standing is None else [Alarm("standing", f"no new step for {_minutes(standing)}: is the run alive?")]
    return [*still, *alarms(follower.rows[-HISTORY:])]


def panel(follower: Follower, width: int) -> Panel:
    """What is known of the run, `width` columns wide."""
    title = Text(str(follower.folder))
    if not follower.rows:
        return Panel(Text("waiting for the first step", style="dim"), title=title, title_align="left", border_style="cyan")
    troubles = warnings(follower)
    parts: list[Any] = [_state(follower), Text(), _numbers(follower.rows[-HISTORY:], width)]
    parts += [Text(), *(Text(f"! {alarm.text}", style="bold red") for alarm in troubles)] if troubles else []
    style = "red" if troubles else "green" if follower.ended else "cyan"
    return Panel(Group(*parts), title=title, title_align="left", border_style=style, padding=(0, 1), width=width)


def _state(follower: Follower) -> Text:
    last = follower.rows[-1] if follower.rows else {"step": 0, "time": 0.0}
    state = "ended" if follower.ended else "running"
    return Text(f"step {last['step']:,} · {_minutes(last['time'])} of running · {state}", style="bold")


def _numbers(rows: Sequence[dict[str, Any]], width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    methods = [(name, name.replace("/", ": ").replace("_", " "), "percent") for name in matching(rows, KEPT)]
    for name, label, form in (*SHOWN, *methods):
        values = [row[name] for row in rows if name in row]
        if values:
            newest = "not finite" if not math.isfinite(values[-1]) else percent(values[-1]) if form == "percent" else number(values[-1])
            style = "bold red" if not math.isfinite(values[-1]) else "bold"
            grid.add_row(label, Text(newest, style=style), Text(sparkline(values, max(8, width - 54)), style="cyan"))
    return grid


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
