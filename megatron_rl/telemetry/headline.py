"""The report's numbers in large type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from megatron_rl.page.figure import Card
from megatron_rl.page.numbers import number, percent

Row = Mapping[str, Any]


def build_cards(summary: Mapping[str, Any], rows: Sequence[Row]) -> list[Card]:
    """The headline numbers, from summary.json where it has them, else from the metrics; without those that nobody measured."""
    cards = [
        _pass_rate(summary, rows),
        _mismatch(summary, rows),
        _routing(summary, rows),
        _speed(summary, rows),
        _time(summary, rows),
        _export(summary),
    ]
    return [card for card in cards if card is not None]


def _pass_rate(summary: Mapping[str, Any], rows: Sequence[Row]) -> Card | None:
    measured = [row["eval/pass_rate"] for row in rows if "eval/pass_rate" in row]
    before = summary.get("pass_rate_before", measured[0] if measured else None)
    after = summary.get("pass_rate_after", measured[-1] if measured else None)
    if before is None or after is None:
        return _first_and_last("Reward", rows, "reward/mean") or _first_and_last("Loss", rows, "loss")
    gain = after - before
    return Card("Held-out pass rate", f"{before:.3f} → {after:.3f}", f"{gain:+.3f}", "good" if gain > 0 else "bad")


def _first_and_last(label: str, rows: Sequence[Row], name: str) -> Card | None:
    values = _finite(rows, name)
    return Card(label, f"{values[0]:.3f} → {values[-1]:.3f}", "first and last step") if values else None


def _mismatch(summary: Mapping[str, Any], rows: Sequence[Row]) -> Card | None:
    replay = _value(summary, "k3_replay", rows, "mismatch/k3_replay")
    live = _value(summary, "k3_live", rows, "mismatch/k3_live")
    if replay is None:
        return Card("Mismatch, k3", number(live), "routed live") if live is not None else None
    if live is None:
        return Card("Mismatch, k3", number(replay), "routes replayed")
    detail = f"{number(live)} routed live" + (f": {live / replay:,.1f} times" if replay > 0 else "")
    return Card("Mismatch, k3, replayed", number(replay), detail)


def _routing(summary: Mapping[str, Any], rows: Sequence[Row]) -> Card | None:
    share = _value(summary, "route_mismatch_share", rows, "routing/token_mismatch_share")
    return None if share is None else Card("Tokens routed otherwise", percent(share), "in at least one layer, without replay")


def _speed(summary: Mapping[str, Any], rows: Sequence[Row]) -> Card | None:
    speed = _value(summary, "tokens_per_second", rows, "tokens_per_second")
    return None if speed is None else Card("Throughput", f"{speed:,.0f}", "tokens a second")


def _time(summary: Mapping[str, Any], rows: Sequence[Row]) -> Card | None:
    seconds = summary.get("seconds", rows[-1]["time"] if rows else None)
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    steps = summary.get("steps", max((row["step"] for row in rows), default=0))
    return Card("Wall clock", f"{minutes} min {rest:02d} s", f"{steps} steps")


def _export(summary: Mapping[str, Any]) -> Card | None:
    if "export_matches" not in summary:
        return None
    same = summary["export_matches"] is True
    return Card("Export", "matches" if same else "differs", "greedy answers of all engines", "good" if same else "bad")


def _value(summary: Mapping[str, Any], key: str, rows: Sequence[Row], name: str) -> float | None:
    """summary[key], or the mean of the metric over the run."""
    if summary.get(key) is not None:
        return float(summary[key])
    values = _finite(rows, name)
    return fmean(values) if values else None


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]
