"""What the gap is made of: routing, staleness, numerics; and where routing flips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...page.figure import NEUTRAL, Axis, Column, Figure, Section, Series, Table
from ...page.numbers import number, percent
from .view import View

PARTS = ("routing", "staleness", "numerics")
SHARE = Axis("share", "percent", zero=True)
PIECES = {
    "through_routes": "newer weights choose other routes",
    "trainer_dtype": "trainer's dtype",
    "quantisation": "quantised weights",
    "rest": "the rest",
}


def attribution(view: View) -> list[Section]:
    """Bars in both orders of removal, and a table over all conditions that could be attributed; nothing where none could."""
    name = view.explained
    if name is None:
        return []
    note = (
        "Each token's d is a sum: routing (what replaying the engine's routes changes), staleness (what taking the engine's weights "
        "changes) and numerics (what is left). Causes interact, so that the order of removal matters; both are drawn. The main one removes "
        "staleness first: routing is then what the engines disagree on with the same weights."
    )
    items: list[Figure | Table] = [_bars(view, name, "variance_share"), _bars(view, name, "tail_share"), *_pieces(view, name), _table(view)]
    return [Section(view.key("causes"), "What the gap is made of", note, items)]


def _bars(view: View, name: str, key: str) -> Figure:
    found = view.conditions[name]["attribution"]
    series = [
        Series(f"{' removed before '.join(one['order'][:2])}", list(PARTS), [one[key][part] for part in PARTS], "bars", color)
        for color, one in zip((2, 5), found["orders"], strict=False)
    ]
    gap = found["largest_difference_between_orders"]
    apart = "" if gap is None else f" The orders differ by at most {number(gap)} nats on a token."
    if key == "variance_share":
        title, note = "Shares of the variance of d", f"{name}. Shares add up to 1; a negative one works against the others.{apart}"
    else:
        count = found["orders"][0]["tail_tokens"]
        title, note = "Shares of the tail", f"{name}. Of the sum of |d| over the {count} tokens with the largest |d|, 1 % of all."
    return Figure(view.key(f"attribution {key}"), title, note, series, Axis("", "text"), SHARE)


def _pieces(view: View, name: str) -> list[Figure]:
    within: Mapping[str, Mapping[str, float | None]] = view.conditions[name]["attribution"]["within"]
    labels = [f"{part}: {PIECES.get(piece, piece)}" for part, pieces in within.items() for piece in pieces]
    if not labels:
        return []
    bars = Series("share of the variance of d", labels, [share for pieces in within.values() for share in pieces.values()], "bars", 2)
    note = f"{name}. Causes taken apart further, as far as the measured conditions allow."
    return [Figure(view.key("pieces"), f"Inside {' and '.join(within)}", note, [bars], Axis("", "text"), SHARE, wide=True)]


def _table(view: View) -> Table:
    columns = [Column("Condition", "text"), Column("Removed first", "text")]
    columns += [Column(f"{part}, variance", "percent", "Share of the variance of d") for part in PARTS]
    columns += [Column(f"{part}, tail", "percent", "Share of the tail's |d|") for part in PARTS]
    columns += [Column(f"{part}, std", note="Standard deviation, nats") for part in PARTS]
    rows: list[list[Any]] = []
    for name in view.whole:
        found = view.conditions[name]["attribution"]
        for one in () if found is None else found["orders"][:1] if found["commute"] else found["orders"]:
            values = [one[key][part] for key in ("variance_share", "tail_share", "std") for part in PARTS]
            rows.append([name, "either" if found["commute"] else one["order"][0], *values])
    note = "One row for each order of removal, or one where both give the same."
    return Table(view.key("attribution"), "Attribution of every condition", note, columns, rows)


def routing(view: View) -> list[Section]:
    """Flips by layer and by margin; nothing for a dense model."""
    layers, margins = view.numbers["layers"], view.numbers["margins"]
    if not layers:
        return []
    share = view.conditions[view.live]["route_mismatch_share"]
    note = (
        f"A flip: the trainer's router chooses other experts than the engine's did, for the same token and weights ({view.live}). "
        f"{percent(share)} of tokens flip in at least one layer."
    )
    items = [*_by_layer(view, layers), *_by_margin(view, margins)]
    return [Section(view.key("routing"), "Where routing flips", note, items)]


def _by_layer(view: View, layers: Sequence[Mapping[str, Any]]) -> list[Figure]:
    at = [str(row["layer"]) for row in layers]
    axis = Axis("MoE layer, from 0", "text")
    figures = [
        Figure(
            view.key("flips by layer"),
            "Flips by layer",
            "Share of positions whose set of experts differs. Later layers inherit what earlier ones did to their inputs.",
            [Series("flipped", at, [row["flip_share"] for row in layers], "bars", 3)],
            axis,
            SHARE,
        )
    ]
    removed = [("removed_alone", "this layer alone"), ("removed_up_to", "all layers up to this one")]
    replayed = [row for row in layers if any(row[key] is not None for key, _ in removed)]
    if replayed:
        bars = [
            Series(f"replay {label}", [str(row["layer"]) for row in replayed], [row[key] for row in replayed], "bars", color)
            for color, (key, label) in zip((3, 6), removed, strict=True)
        ]
        note = "Share of routing's variance that goes when the layer is replayed. A layer high here is where a flip matters."
        if len(replayed) < len(layers):
            note += " Only some layers were replayed."
        figures.append(Figure(view.key("removed by layer"), "What replaying a layer removes", note, bars, axis, SHARE))
    margins = [("margin_at_flips", "where it flips", 3), ("margin_elsewhere", "elsewhere", NEUTRAL)]
    bars = [Series(label, at, [row[key] for row in layers], "bars", color) for key, label, color in margins]
    if any(y is not None for s in bars for y in s.y):
        note = "Mean gap between the last chosen expert's log-score and the next one's. Routers flip where the choice was close."
        figures.append(Figure(view.key("margins by layer"), "Router margin by layer", note, bars, axis, Axis("log-score", zero=True)))
    return figures


def _by_margin(view: View, rows: Sequence[Mapping[str, float]]) -> list[Figure]:
    if not rows:
        return []
    at = [number(row["margin_to"], 2) for row in rows]
    axis = Axis("least margin of the token's layers, up to", "text")
    flips = Series("flipped in some layer", at, [row["flip_share"] for row in rows], "bars", 3)
    sizes = [
        Series("routing's part of d", at, [row["mean_abs_routing"] for row in rows], "bars", 3),
        Series("d", at, [row["mean_abs_d"] for row in rows], "bars", NEUTRAL),
    ]
    return [
        Figure(
            view.key("flips by margin"),
            "Flips by margin",
            "Equally many tokens in each bar, from the closest choice to the clearest.",
            [flips],
            axis,
            SHARE,
        ),
        Figure(
            view.key("size by margin"),
            "Mean size by margin",
            "What close choices cost, in the same bins.",
            sizes,
            axis,
            Axis("nats", zero=True),
        ),
    ]
