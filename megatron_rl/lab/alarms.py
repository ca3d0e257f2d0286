"""What in a run's metrics a person should be told of: pure functions over the rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..page.numbers import number, percent

Row = Mapping[str, Any]
RECENT = 10
"""Values of a metric that count as now; before them as many must lie to compare with."""
KEPT_PARTS = ("kept_share", "accepted", "effective_share")


@dataclass(frozen=True)
class Alarm:
    """Something a person should look at."""

    kind: str
    """What it is about, the same from step to step."""
    text: str


@dataclass(frozen=True)
class Rule:
    """A metric whose median of the last values must stay within a factor of its median before."""

    metric: str
    factor: float
    """Above 1: it must not rise by this; below 1: it must not fall to this."""
    says: str
    unless_below: float = 0.0
    """Values too small to matter."""


RULES = (
    Rule("mismatch/k3_trained", 3, "mismatch rises", 1e-6),
    Rule("mismatch/k3_replay", 3, "mismatch with replay rises", 1e-6),
    Rule("mismatch/k3_live", 3, "mismatch without replay rises", 1e-6),
    Rule("routing/token_mismatch_share", 2, "more tokens are routed otherwise", 0.01),
    Rule("grad_norm", 5, "gradients grow", 1e-3),
    Rule("response/length", 2, "answers grow longer"),
    Rule("entropy", 0.2, "entropy collapses"),
)
LARGEST_K3 = 0.05
"""Mean k3 a token above which the surrogate says little of the policy that samples."""
LARGEST_UNREPLAYABLE = 0.1
LEAST_KEPT = 0.5
"""Share of a batch below which a mask or a weight leaves too little."""


def alarms(rows: Sequence[Row]) -> list[Alarm]:
    """The gravest first; empty when all is well."""
    found: list[Alarm] = []
    for check in (_not_finite, _large, _replay_fails, _unreplayable, _trends, _acceptance):
        found += check(rows)
    return found


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The metric's finite values in order."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def matching(rows: Sequence[Row], parts: Sequence[str]) -> list[str]:
    """Names of methods' metrics that hold one of the parts after the slash."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if any(part in name.partition("/")[2] for part in parts)]


def _not_finite(rows: Sequence[Row]) -> list[Alarm]:
    """Metrics whose newest values are not finite, with the step at which that began."""
    found = []
    for name in dict.fromkeys(name for row in rows[-RECENT:] for name in row):
        began = None
        for row in rows:
            if name in row:
                began = None if math.isfinite(row[name]) else row["step"] if began is None else began
        if began is not None:
            found.append(Alarm(f"not finite: {name}", f"{name} is not finite since step {began}"))
    return found


def _large(rows: Sequence[Row]) -> list[Alarm]:
    for name in ("mismatch/k3_trained", "mismatch/k3_replay"):
        values = column(rows, name)[-RECENT:]
        if values and median(values) > LARGEST_K3:
            return [Alarm("large", f"{name} is {number(median(values))}: trainer and engine are far apart")]
    return []


def _replay_fails(rows: Sequence[Row]) -> list[Alarm]:
    replay, live = column(rows, "mismatch/k3_replay")[-RECENT:], column(rows, "mismatch/k3_live")[-RECENT:]
    if not replay or not live or not median(replay) > 2 * median(live) or median(replay) < 1e-6:
        return []
    text = f"k3 is {number(median(replay))} with routes replayed and {number(median(live))} without: are they the right rows?"
    return [Alarm("replay", text)]


def _unreplayable(rows: Sequence[Row]) -> list[Alarm]:
    values = column(rows, "routing/unreplayable_share")
    if not values or values[-1] <= LARGEST_UNREPLAYABLE:
        return []
    return [Alarm("unreplayable", f"{percent(values[-1])} of routes cannot be replayed: answers span weight versions")]


def _trends(rows: Sequence[Row]) -> list[Alarm]:
    return [Alarm(rule.says, text) for rule in RULES if (text := _trend(rule, column(rows, rule.metric)))]


def _trend(rule: Rule, values: Sequence[float]) -> str:
    before, now = values[:-RECENT], values[-RECENT:]
    if len(before) < RECENT:
        return ""
    earlier, newer = median(before), median(now)
    compare: Callable[[float, float], bool] = float.__gt__ if rule.factor > 1 else float.__lt__
    if max(earlier, newer) < rule.unless_below or not compare(float(newer), rule.factor * earlier):
        return ""
    return f"{rule.says}: {rule.metric} is {number(newer)}, {number(earlier)} before"


def _acceptance(rows: Sequence[Row]) -> list[Alarm]:
    found = []
    for name in matching(rows, KEPT_PARTS):
        values = column(rows, name)[-RECENT:]
        if values and median(values) < LEAST_KEPT:
            found.append(Alarm(f"kept: {name}", f"little is left to train on: {name} is {percent(median(values))}"))
    return found
