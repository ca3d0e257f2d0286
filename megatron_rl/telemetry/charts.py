"""Which curves the report draws, from which metrics: plain data, drawn by report.html in the browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = Mapping[str, Any]
SMOOTHING = 10
"""Steps of the trailing mean drawn over the reward."""
SMALLEST_PHASE = 0.01
"""Share of the time below which a phase is not drawn on its own."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: Literal["line", "faint", "points", "stack"] = "line"
    color: int = 0
    """Index into the page's palette."""
    symbol: str = "diamond"


@dataclass(frozen=True)
class Chart:
    """One figure."""

    title: str
    note: str
    """One sentence that says how to read it."""
    series: Sequence[Series]
    unit: str = ""
    log: bool = False
    wide: bool = False
    tick_format: str = ""
    """d3-format of the vertical axis."""
    hover_format: str = ".4~g"
    zero: bool = False
    """Whether the vertical axis starts at 0."""
    more: bool = False
    """Shown only when the reader opens the rest."""


@dataclass
class Metrics:
    """Columns of metrics.jsonl, and which of them a chart has used."""

    rows: Sequence[Row]
    used: set[str] = field(default_factory=lambda: {"step", "time"})

    def names(self) -> list[str]:
        """Every metric's name, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> tuple[list[float], list[float | None]]:
        """(steps, values) where the metric was written; None where it was not finite."""
        self.used.add(name)
        pairs = [(row["step"], row[name]) for row in self.rows if name in row]
        return [step for step, _ in pairs], [value if math.isfinite(value) else None for _, value in pairs]

    def series(self, name: str, label: str, **look: Any) -> list[Series]:
        """The metric as a curve; nothing where it was never written."""
        x, y = self.column(name)
        return [Series(label, x, y, **look)] if x else []


def build_charts(rows: Sequence[Row]) -> list[Chart]:
    """The figures, the wide one first, without those that have no data, then one for each metric that no figure shows."""
    metrics = Metrics(rows)
    charts = [
        _reward(metrics),
        _pair(metrics, "Mismatch, k3", "mismatch/k3", "Mean k3 of trainer against engine, a token. Lower is better.", "nats"),
        _pair(metrics, "Mismatch, max |d|", "mismatch/max_abs", "Largest log-prob difference of any token in the step.", "nats"),
        _routing(metrics),
        _phases(metrics),
        _single(metrics, "response/length", "Response length", "Mean sampled tokens an answer.", unit="tokens", hover_format=".1f"),
        _single(
            metrics,
            "tokens_per_second",
            "Throughput",
            "Tokens a second, over the whole step.",
            unit="tokens/s",
            hover_format=",.0f",
            zero=True,
        ),
        _single(metrics, "loss", "Loss", "What the optimizer steps on.", wide="reward/mean" not in metrics.names()),
        _single(metrics, "grad_norm", "Gradient norm", "Global, before clipping.", zero=True),
        _single(metrics, "lr", "Learning rate", "", tick_format=".1~e", hover_format=".3~e", zero=True),
        _single(metrics, "entropy", "Entropy", "Of the policy, mean a token. A fall to 0 is a collapse.", unit="nats"),
    ]
    rest = [_single(metrics, name, name, "", more=True) for name in metrics.names() if name not in metrics.used]
    return sorted((chart for chart in (*charts, *rest) if chart.series), key=lambda chart: not chart.wide)


def _reward(metrics: Metrics) -> Chart:
    x, y = metrics.column("reward/mean")
    curves = (
        [Series("each step", x, y, "faint", 0), Series(f"mean of {SMOOTHING} steps", x, trailing_mean(y, SMOOTHING), "line", 0)]
        if x
        else []
    )
    curves += metrics.series("eval/pass_rate", "held-out, sampled", kind="points", color=1)
    curves += metrics.series("eval/greedy_pass_rate", "held-out, greedy", kind="points", color=2, symbol="circle")
    note = "Mean reward of the sampled answers, and the pass rate on held-out prompts."
    return Chart("Reward", note, curves, wide=True, hover_format=".3f")


def _pair(metrics: Metrics, title: str, prefix: str, note: str, unit: str) -> Chart:
    curves = metrics.series(f"{prefix}_replay", "routes replayed", color=0) + metrics.series(f"{prefix}_live", "routed live", color=1)
    return Chart(title, note, curves, unit=unit, log=True, hover_format=".2~e")


def _routing(metrics: Metrics) -> Chart:
    curves = metrics.series("routing/token_mismatch_share", "tokens, in at least one layer", color=1)
    curves += metrics.series("routing/layer_mismatch_share", "token-layer pairs", color=3)
    note = "Share that trainer and engine send to other experts without replay."
    return Chart("Routed otherwise", note, curves, tick_format=".0%", hover_format=".2%", zero=True)


def _phases(metrics: Metrics) -> Chart:
    """Stacks the phases, the costliest at the bottom; small ones and what no phase accounts for are "other", on top."""
    metrics.used.add("seconds/step")
    steps = [row for row in metrics.rows if "seconds/step" in row]
    names = {name for row in steps for name in row if name.startswith("seconds/") and name != "seconds/step"}
    metrics.used.update(names)
    whole = sum(row["seconds/step"] for row in steps)
    totals = {name: sum(row.get(name, 0.0) for row in steps) for name in sorted(names)}
    large = sorted((name for name, total in totals.items() if total >= SMALLEST_PHASE * whole), key=lambda name: -totals[name])
    columns = {name.removeprefix("seconds/"): [row.get(name, 0.0) for row in steps] for name in large}
    columns["other"] = [max(0.0, row["seconds/step"] - sum(row.get(name, 0.0) for name in large)) for row in steps]
    x = [row["step"] for row in steps]
    curves = [Series(name, x, column, "stack", color) for color, (name, column) in enumerate(columns.items()) if any(column)]
    return Chart("Seconds a step, by phase", "Wall clock, stacked.", curves, unit="s", hover_format=".2f")


def _single(metrics: Metrics, name: str, title: str, note: str, **look: Any) -> Chart:
    return Chart(title, note, metrics.series(name, title), **look)


def trailing_mean(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of the last `width` values at each place; None among them is left out."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(window) / len(window) if window else None)
    return means
