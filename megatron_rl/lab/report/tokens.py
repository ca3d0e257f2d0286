"""The log-ratios themselves: histogram, tails, and d against the token's probability."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...page.figure import NEUTRAL, Axis, Column, Figure, Section, Series, Table
from ...page.numbers import number
from .tails import tails_figure
from .view import Floats, View

BINS = 81
POINTS, FEWER = 900, 300
"""Tokens drawn of a cloud, in the main engine setting and in the others."""
EXTREME = 100
"""Of them those with the largest |d|; the others are evenly many."""


def distribution(view: View) -> Section:
    """Histogram, tails, and d against the token's probability."""
    items: list[Figure | Table] = [_histogram(view), _tails(view)]
    items += [_law(view, name) for name in _pair(view)]
    items += _law_table(view)
    note = "The mean says little: what collapses a run is the tail, a few tokens that the two engines see very differently."
    return Section(view.key("tokens"), "Tokens: the log-ratio and its tails", note, items)


def _pair(view: View) -> list[str]:
    """With the engine's weights: the condition without replay, and the one with the engine's routes."""
    return [view.live, *([] if view.replayed is None else [view.replayed])]


def _histogram(view: View) -> Figure:
    names = view.compared[:2]
    values = {name: view.log_ratios(name) for name in names}
    reach = max(float(np.abs(d).max()) for d in values.values()) or 1e-6
    edges = np.linspace(-reach, reach, BINS + 1)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    series = [
        Series(name, middles, [int(n) or None for n in np.histogram(d, edges)[0]], "steps", view.color(name)) for name, d in values.items()
    ]
    note = "Tokens by d, with the engine's own weights. The axis of counts is logarithmic, so that a single token shows at the edges."
    return Figure(view.key("histogram"), "Log-ratio d", note, series, Axis("d, nats"), Axis("tokens", "integer", log=True))


def _tails(view: View) -> Figure:
    note = "Share of tokens whose |d| is at least x; both axes are logarithmic. A curve that ends further right has the heavier tail."
    values = {name: view.log_ratios(name) for name in view.compared}
    return tails_figure(view.key("tails"), "Tails of |d|", note, values, {name: view.color(name) for name in values}, view)


def _law(view: View, name: str) -> Figure:
    law = view.numbers["law"][name]
    x, y = view.rest, np.abs(view.log_ratios(name))
    shown = _chosen(x, y, FEWER if view.prefix else POINTS)
    series = [Series("tokens", x[shown].tolist(), y[shown].tolist(), "points", NEUTRAL)]
    bins = [b for b in law["bins"] if b["mean_rest"] > 0 and b["mean_abs_d"] > 0]
    ends = [b["mean_rest"] for b in bins]
    series.append(Series("mean of a bin", ends, [b["mean_abs_d"] for b in bins], "line", view.color(name)))
    fit = ""
    if law["slope"] is not None:
        last = bins[-1]["mean_abs_d"] / ends[-1]
        series.append(Series("slope 1", ends, [last * at for at in ends], "line", 7, dashed=True))
        fit = f" Fitted slope {number(law['slope'])}."
    drawn = f" {len(shown):,} tokens are drawn, the largest among them." if len(shown) < len(x) else ""
    note = f"p is the engine's probability of the token. DVP's law says that |d| grows as 1\u00a0−\u00a0p: slope 1.{fit}{drawn}"
    title = f"d against p, {name}"
    return Figure(view.key(f"law {name}"), title, note, series, Axis("1 − p", log=True), Axis("|d|, nats", log=True))


def _chosen(x: Floats, y: Floats, points: int) -> NDArray[np.intp]:
    """Indices of at most `points` tokens that a logarithmic figure can show: the largest, and evenly many of the others."""
    visible = np.flatnonzero((x > 0) & (y > 0))
    order = visible[np.argsort(-y[visible], kind="stable")]
    others = np.sort(order[EXTREME:])
    step = max(1, int(np.ceil(len(others) / (points - EXTREME))))
    return np.sort(np.concatenate([order[:EXTREME], others[::step]]))


def _law_table(view: View) -> list[Table]:
    columns = [
        Column("Condition", "text"),
        Column("Bound", "text"),
        Column("Tokens inside", "percent"),
        Column("Used, median", "percent", "|d| over the bound"),
        Column("Used, 99 %", "percent", "|d| over the bound, 99th percentile"),
        Column("Mean logit noise ε", note="Half the spread of the log-prob differences at a position, nats"),
    ]
    names = {
        "exact": "−log(p + (1−p) exp(±2ε))",
        "slope": "(exp(2ε) − 1)(1 − p)",
        "smaller": "2ε(1 − min(p, q))",
        "naive": "2ε(1 − p), no theorem",
    }
    rows = []
    for condition, law in view.numbers["law"].items():
        found = law["bounds"]
        for key, label in names.items() if found else ():
            b = found[key]
            rows.append([condition, label, b["inside_share"], b["used_median"], b["used_p99"], found["noise_mean"]])
    note = "Bounds of |d| for logits that differ by at most ε, on each token with its own ε. Inside should be 100 % but for the last."
    return [Table(view.key("law bounds"), "The bounds behind the law", note, columns, rows)] if rows else []
