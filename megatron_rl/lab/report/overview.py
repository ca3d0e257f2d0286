"""How large the gap is: every condition of every engine setting beside the floor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...page.figure import NEUTRAL, Axis, Column, Figure, Section, Series, Table
from .tails import tails_figure
from .view import Floats, View

K3 = "k3\u00a0=\u00a0exp(d)\u00a0−\u00a01\u00a0−\u00a0d"


def overview(views: list[View]) -> Section:
    """Every condition of every engine setting in one table, and their k3 in one figure."""
    note = (
        f"d is the log-prob of a sampled token in the trainer less that in the engine, in nats; {K3} estimates how far the two "
        "policies diverge. The floor is what two scorings by the same weights differ by; a gap near it cannot be told from no gap."
    )
    return Section("gap", "How large the gap is", note, [_by_condition(views), *_numerics(views), conditions(views[0]), _floors(views)])


def _by_condition(views: list[View]) -> Figure:
    names = list(dict.fromkeys(name for view in views for name in view.whole))
    series = []
    for color, view in enumerate(views):
        values = [view.conditions[name]["mean_k3"] if name in view.whole else None for name in names]
        series.append(Series(f"engine {view.name}", names, values, "points", color))
        floor = view.floor("mean_k3")
        if floor is not None:
            series.append(
                Series(f"floor of {view.name}", names, [floor] * len(names), "line", NEUTRAL if color == 0 else color, dashed=True)
            )
    note = "Mean k3 a token under each condition of the trainer. The axis is logarithmic; a point near the dashed floor is no gap at all."
    axis = Axis("mean k3, nats", log=True)
    return Figure("k3_by_condition", "Mismatch by condition", note, series, Axis("condition", "text"), axis, wide=True, rows=True)


def _numerics(views: list[View]) -> list[Figure]:
    """The tails of numerics alone, with the engine's weights and routes: by engine setting, and by the trainer's dtype."""
    first = views[0]
    c = first.sample.rescored[first.replayed or first.live].condition
    engines: dict[str, Floats] = {view.name: view.log_ratios(view.replayed or view.live) for view in views}
    dtypes: dict[str, Floats] = {
        one.condition.dtype: first.log_ratios(name)
        for name, one in first.sample.rescored.items()
        if replace(one.condition, name=c.name, dtype=c.dtype) == c
    }
    note = f"Numerics alone: the engine's weights{' and routes' if first.replayed else ''}, "
    figures = []
    if len(engines) > 1:
        figures.append(tails_figure("tails_by_engine", "Tails of |d| by engine", f"{note}trainer {c.name}.", engines))
    if len(dtypes) > 1:
        figures.append(tails_figure("tails_by_dtype", "Tails of |d| by the trainer's dtype", f"{note}engine {first.name}.", dtypes))
    return figures


def conditions(view: View) -> Table:
    """Every condition that replays all layers or none, beside the floor."""
    columns = [
        Column("Condition of the trainer", "text"),
        Column("Mean k3", note=f"{K3}, mean over tokens"),
        Column("× floor", note="Mean k3 over the largest one between two scorings by the same weights"),
        Column("Mean |d|"),
        Column("99 % of |d| below"),
        Column("Max |d|"),
        Column("|d| over 0.1", "percent", "Share of tokens"),
        Column("Tokens routed otherwise", "percent", "In at least one layer"),
    ]
    floor = view.floor("mean_k3")
    rows: list[list[Any]] = []
    for name in view.whole:
        c = view.conditions[name]
        sizes = [c[key] for key in ("mean_abs_d", "abs_d_p99", "max_abs_d", "share_beyond_0.1", "route_mismatch_share")]
        rows.append([name, c["mean_k3"], c["mean_k3"] / floor if floor else None, *sizes])
    note = "A click on a column's head sorts. Conditions that replay single layers are in the routing figures."
    return Table(view.key("conditions"), f"All conditions, engine {view.name}", note, columns, rows)


def _floors(views: list[View]) -> Table:
    columns = [
        Column("Engine", "text"),
        Column("Repeated", "text"),
        Column("Mean k3"),
        Column("Mean |d|"),
        Column("Max |d|"),
        Column("Tokens", "integer"),
    ]
    keys = ("mean_k3", "mean_abs_d", "max_abs_d", "tokens")
    rows = [[v.name, what, *(one.get(key) for key in keys)] for v in views for what, one in v.numbers["floor"].items()]
    note = "No update in between: the same weights score the same tokens twice. The largest of each number is the floor."
    return Table("floors", "The floor", note, columns, rows)
