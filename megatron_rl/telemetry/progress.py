"""What a person sees while a run goes on: a live panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.telemetry.sparkline import sparkline

Mode = Literal["auto", "rich", "plain", "none"]
HISTORY = 10_000
"""Rewards the sparkline remembers."""
CURVE_WIDTH = 44
PHASES_SHOWN = 6
PLAIN_INTERVAL = 5.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """Shows the newest metrics of a run; every rank may make one, only rank 0 shows anything.

    Use as a context manager: leaving it puts the terminal right, also after an exception.
    """

    def __init__(self, mode: Mode, total: int, *, title: str = "", rank: int = 0, first: int = 0, console: Console | None = None) -> None:
        """Chooses the display.

        Args:
            mode: auto takes rich on a terminal and plain elsewhere.
            total: steps of the whole run; 0 when that is not known.
            title: the panel's heading, e.g. the run's folder.
            rank: this process's global rank.
            first: steps done before this process started (a resumed run).
            console: where to show it; standard output otherwise.
        """
        self._console = console or Console()
        chosen = ("rich" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self.mode: Mode = "none" if rank != 0 else chosen
        self._total, self._title, self._first = total, title, first
        self._step = first
        self._values: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._began = time.monotonic()
        self._last_line = -PLAIN_INTERVAL
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.mode == "rich":
            self._live = Live(self._panel(), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows step `step` (the number of steps done); names that `values` lacks keep what they showed last."""
        if self.mode == "none":
            return
        self._step = step
        self._values.update(values)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        elif self.mode == "plain" and self._is_due(values):
            self._console.print(self.line(values), highlight=False, markup=False, soft_wrap=True)

    def _is_due(self, values: Mapping[str, float]) -> bool:
        """A line every few seconds, and one for each evaluation and for the last step: logs of fast steps stay readable."""
        now = time.monotonic()
        due = now - self._last_line >= PLAIN_INTERVAL or 0 < self._total <= self._step or any(name.startswith("eval/") for name in values)
        if due:
            self._last_line = now
        return due

    def note(self, text: str) -> None:
        """One line for people, above the panel: a phase begins, a file was written."""
        if self.mode != "none":
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def line(self, values: Mapping[str, float]) -> str:
        """The step in one line."""
        parts = [f"step {self._step}/{self._total}" if self._total else f"step {self._step}"]
        for name, label, form in _LINE:
            if name in values:
                parts.append(f"{label} {_show(values[name], form)}")
        parts += [f"{phase} {seconds:.2f}s" for phase, seconds in _phases(values)[:PHASES_SHOWN]]
        return " · ".join(parts)

    def _panel(self) -> Panel:
        if not self._values:
            return Panel(Text("waiting for the first step", style="dim"), title=self._title or None, border_style="cyan")
        body = Group(self._head(), Text(), self._numbers(), Text(), _phase_table(self._values))
        return Panel(body, title=self._title or None, title_align="left", border_style="cyan", padding=(0, 1))

    def _head(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self._total, completed=self._step, complete_style="cyan", finished_style="green")
        grid.add_row(Text(f"step {self._step}/{self._total}", style="bold"), bar, Text(self._remaining(), style="dim"))
        return grid

    def _remaining(self) -> str:
        done = self._step - self._first
        elapsed = time.monotonic() - self._began
        if done <= 0:
            return ""
        left = elapsed / done * (self._total - self._step)
        return f"{_duration(elapsed)} gone, {_duration(left)} left"

    def _numbers(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
        values = self._values
        if "reward/mean" in values:
            curve = (sparkline(tuple(self._rewards), CURVE_WIDTH), "green")
            grid.add_row("reward", Text.assemble((_show(values["reward/mean"], ".3f"), "bold"), "  ", curve))
        for label, text in (*_task_rows(values), *_mismatch_rows(values)):
            grid.add_row(label, text)
        return grid


_LINE = (
    ("reward/mean", "reward", ".3f"),
    ("eval/pass_rate", "held-out", ".3f"),
    ("loss", "loss", ".4f"),
    ("response/length", "length", ".1f"),
    ("mismatch/k3_replay", "k3", ".1e"),
    ("mismatch/k3_live", "k3 live", ".1e"),
    ("mismatch/max_abs_replay", "max|d|", ".2g"),
    ("mismatch/max_abs_live", "max|d| live", ".2g"),
    ("routing/token_mismatch_share", "routed otherwise", ".1%"),
    ("tokens_per_second", "tok/s", ",.0f"),
    ("seconds/step", "step", ".2f"),
)


def _task_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    rows = []
    if "eval/pass_rate" in values:
        greedy = f"   greedy {_show(values['eval/greedy_pass_rate'], '.3f')}" if "eval/greedy_pass_rate" in values else ""
        rows.append(("held-out pass rate", f"{_show(values['eval/pass_rate'], '.3f')}{greedy}"))
    for name, label, form, unit in (
        ("loss", "loss", ".4f", ""),
        ("response/length", "response", ".1f", " tokens"),
        ("tokens_per_second", "speed", ",.0f", " tokens/s"),
    ):
        if name in values:
            rows.append((label, _show(values[name], form) + unit))
    return rows


def _mismatch_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    rows = []
    for label, suffix in (("mismatch, replayed", "replay"), ("mismatch, live routing", "live")):
        k3, largest = values.get(f"mismatch/k3_{suffix}"), values.get(f"mismatch/max_abs_{suffix}")
        if k3 is not None or largest is not None:
            rows.append((label, f"k3 {_show(k3, '.2e')}   max |d| {_show(largest, '.3g')}"))
    if "routing/token_mismatch_share" in values:
        rows.append(("routed otherwise", f"{_show(values['routing/token_mismatch_share'], '.2%')} of tokens, in at least one layer"))
    return rows


def _phases(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """(phase, seconds), longest first, without the step's own total."""
    phases = [(name.removeprefix("seconds/"), value) for name, value in values.items() if name.startswith("seconds/")]
    return sorted(((name, value) for name, value in phases if name != "step"), key=lambda pair: -pair[1])


def _phase_table(values: Mapping[str, float]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, style="cyan")
    phases = _phases(values)[:PHASES_SHOWN]
    longest = max((seconds for _, seconds in phases), default=0.0)
    for name, seconds in phases:
        grid.add_row(name, f"{seconds:.2f} s", "█" * round(24 * seconds / longest) if longest else "")
    if "seconds/step" in values:
        grid.add_row("whole step", f"{values['seconds/step']:.2f} s", "")
    return grid


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else "nan" if math.isnan(value) else format(value, form)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
