"""What token gaps add up to over a sequence: drift, lengths, and the bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...page.figure import NEUTRAL, Axis, Column, Figure, Section, Series, Table
from ...page.numbers import number
from ..sequence import FEWEST
from .view import View

BOUNDS = {
    "classical": "Classical",
    "pinsker_marginal_kl": "Pinsker-marginal KL",
    "pinsker_marginal_tv": "Pinsker-marginal TV",
    "mixed_kl": "Mixed KL",
    "mixed_tv": "Mixed TV",
    "coupling": "Coupling",
    "adaptive_kl": "Adaptive KL",
    "adaptive_tv": "Adaptive TV",
    "adaptive": "Adaptive, both",
}


def sequences(view: View) -> Section:
    """Drift of every trained condition, and the table of lengths."""
    chosen = _chosen(view)
    items: list[Figure | Table] = [_fan(view, name) for name in chosen]
    items += [_growth(view), _lengths(view)]
    note = (
        "S is the sum of d over a prefix: the log of the ratio by which sequence-level corrections weight. Independent gaps grow as the "
        "root of t, gaps of one sign as t."
    )
    return Section(view.key("sequences"), "Sequences: prefix drift", note, items)


def bounds(view: View) -> Section:
    """TRM's nine bounds against the horizon, and which certifies an improvement."""
    items: list[Figure | Table] = [_bounds(view, name) for name in _chosen(view)]
    items += [_certificates(view), _all_bounds(view)]
    note = (
        "TRM's nine bounds of the surrogate's error, rewards in [0, 1]. The smallest, B*, counts: a surrogate above it certifies that the "
        "step improved the policy. Maxima are over the sampled tokens, so that a certificate is only as good as the sample."
    )
    return Section(view.key("bounds"), "Bounds", note, items)


def _chosen(view: View) -> list[str]:
    """Without replay, and with the engine's routes: the two whose figures stand side by side."""
    kinds = [name for name in view.trained if view.sample.rescored[name].condition.replay in ("none", "R3")]
    return (kinds or view.trained)[:2]


def _fan(view: View, name: str) -> Figure:
    drift = view.numbers["trained"][name]["drift"]
    fan, color = _reached(drift["fan"]), view.color(name)
    t = [row["t"] for row in fan]
    series = [
        Series("5 to 95 %", t, [None] * len(t), "band", color, low=[row["q05"] for row in fan], high=[row["q95"] for row in fan]),
        Series("25 to 75 %", t, [None] * len(t), "band", color, low=[row["q25"] for row in fan], high=[row["q75"] for row in fan]),
        Series("median", t, [row["q50"] for row in fan], "line", color),
        Series("mean", t, [row["mean"] for row in fan], "line", NEUTRAL, dashed=True),
    ]
    note = (
        f"Quantiles over sequences that reach t tokens; {fan[0]['sequences']} do at first, {fan[-1]['sequences']} at last. "
        f"A token adds {number(drift['mean_per_token'])} on average."
    )
    return Figure(view.key(f"drift {name}"), f"Prefix drift, {name}", note, series, Axis("t, tokens", "integer"), Axis("S, nats"))


def _reached(fan: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """The lengths that enough sequences reach for a spread."""
    return [row for row in fan if row["sequences"] >= FEWEST] or fan


def _growth(view: View) -> Figure:
    series = []
    exponents = []
    for name in view.trained:
        drift = view.numbers["trained"][name]["drift"]
        fan = _reached(drift["fan"])
        series.append(Series(name, [row["t"] for row in fan], [row["rms"] for row in fan], "line", view.color(name)))
        if drift["exponent"] is not None:
            exponents.append(f"{name} {number(drift['exponent'], 2)}")
    fan = _reached(view.numbers["trained"][view.trained[0]]["drift"]["fan"])
    start = fan[0]["rms"]
    for label, power, color in (("root of t: random walk", 0.5, NEUTRAL), ("t: drift", 1.0, 7)):
        series.append(Series(label, [row["t"] for row in fan], [start * row["t"] ** power for row in fan], "line", color, dashed=True))
    fitted = f" Fitted exponents: {', '.join(exponents)}." if exponents else ""
    note = f"Root mean square of S over sequences; both axes are logarithmic, so that a power of t is a straight line.{fitted}"
    return Figure(
        view.key("growth"),
        "How drift grows",
        note,
        series,
        Axis("t, tokens", "integer", log=True),
        Axis("RMS of S, nats", log=True),
        wide=True,
    )


def _lengths(view: View) -> Table:
    columns = [
        Column("Condition", "text"),
        Column("From", "integer", "Tokens"),
        Column("To", "integer", "Tokens"),
        Column("Sequences", "integer"),
        Column("Mean k3"),
        Column("Max |d|"),
        Column("Mean |S|", note="Of the whole sequence"),
        Column("Mean S"),
        Column("Reward"),
    ]
    keys = ("length_from", "length_to", "sequences", "mean_k3", "max_abs_d", "mean_abs_sum", "mean_sum", "reward")
    rows = [[name, *(row[key] for key in keys)] for name in _chosen(view) for row in view.numbers["trained"][name]["lengths"]]
    note = "Sequences from short to long, equally many in a row. Whatever rejects whole sequences by their sum rejects the long ones first."
    return Table(view.key("lengths"), "By length", note, columns, rows)


def _bounds(view: View, name: str) -> Figure:
    trained = view.numbers["trained"][name]
    rows = trained["bounds_by_horizon"]
    t = [row["horizon"] for row in rows]
    series = [
        Series(label, t, [row.get(key) for row in rows], "line", i, dashed=i >= 6)
        for i, (key, label) in enumerate(BOUNDS.items())
        if key in rows[0]
    ]
    series.append(Series("1: no bound any more", t, [1.0] * len(t), "line", NEUTRAL, dashed=True))
    certificate = trained["certificate"]
    note = (
        f"The same sequences cut at T tokens. At full length B* is {number(certificate['best_value'])}, from {BOUNDS[certificate['best']]}."
    )
    return Figure(
        view.key(f"bounds {name}"),
        f"Bounds against T, {name}",
        note,
        series,
        Axis("T, tokens", "integer", log=True),
        Axis("bound on the error", log=True),
    )


def _certificates(view: View) -> Table:
    columns = [
        Column("Condition", "text"),
        Column("Surrogate L′"),
        Column("Standard error"),
        Column("B*", note="The smallest bound"),
        Column("Which", "text"),
        Column("Certified", "text", "L′ above B*"),
    ]
    rows: list[list[Any]] = []
    for name in view.trained:
        c: Mapping[str, Any] = view.numbers["trained"][name]["certificate"]
        verdict = {True: "yes", False: "no", None: "rewards outside [0, 1]"}[c["certified"]]
        rows.append([name, c["surrogate"], c["surrogate_standard_error"], c["best_value"], BOUNDS[c["best"]], verdict])
    note = (
        "L′ estimates the improvement to first order. Above B* the improvement is certain, as far as the sampled maxima are the true ones."
    )
    return Table(view.key("certificates"), "Certified improvement", note, columns, rows)


def _all_bounds(view: View) -> Table:
    found = {name: view.numbers["trained"][name]["certificate"]["bounds"] for name in view.trained}
    columns = [Column("Bound", "text"), *(Column(name) for name in found)]
    rows = [[label, *(values.get(key) for values in found.values())] for key, label in BOUNDS.items()]
    return Table(
        view.key("bounds at length"), "Bounds at full length", "Above 1 a bound says nothing: rewards differ by no more.", columns, rows
    )
