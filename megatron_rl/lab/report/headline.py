"""The report's numbers in large type, each with the floor beside it, and the finding in two sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...page.figure import Card
from ...page.numbers import number, percent
from .view import View


def cards(view: View) -> list[Card]:
    """The headline of the main engine setting."""
    live, replayed = view.conditions[view.live], None if view.replayed is None else view.conditions[view.replayed]
    found = [Card("Mean k3" + (", routed live" if replayed else ""), number(live["mean_k3"]), _floor(view, "mean_k3"))]
    if replayed:
        found.append(Card("Mean k3, routes replayed", number(replayed["mean_k3"]), _floor(view, "mean_k3")))
    found.append(Card("Largest |d|" + (", routed live" if replayed else ""), number(live["max_abs_d"]), _floor(view, "max_abs_d")))
    if replayed:
        found.append(Card("Largest |d|, routes replayed", number(replayed["max_abs_d"]), _floor(view, "max_abs_d")))
    if live["route_mismatch_share"] is not None:
        share = view.floor("route_mismatch_share")
        floor = "in at least one layer" if share is None else f"floor {percent(share)}"
        found.append(Card("Tokens routed otherwise", percent(live["route_mismatch_share"]), floor))
    found += [*_cause(view), *_certificate(view)]
    found.append(Card("Tokens measured", f"{view.numbers['tokens']:,}", f"{view.numbers['trajectories']:,} answers"))
    return found


def _floor(view: View, name: str) -> str:
    floor = view.floor(name)
    return "no floor measured" if floor is None else f"floor {number(floor)}"


def _cause(view: View) -> list[Card]:
    if view.explained is None:
        return []
    shares: Mapping[str, float | None] = view.conditions[view.explained]["attribution"]["orders"][0]["variance_share"]
    known = {part: share for part, share in shares.items() if share is not None}
    if not known:
        return []
    first = max(known, key=known.__getitem__)
    others = ", ".join(f"{part} {percent(share)}" for part, share in known.items() if part != first)
    return [Card("Largest cause", f"{first}, {percent(known[first])}", f"of the variance of d; {others}")]


def _certificate(view: View) -> list[Card]:
    found: Mapping[str, Any] = view.numbers["trained"][view.trained[0]]["certificate"]
    if found["surrogate"] is None:
        return []
    verdict = "certified" if found["certified"] else "not certified"
    detail = f"L′ {number(found['surrogate'])} ± {number(found['surrogate_standard_error'], 2)}, B* {number(found['best_value'])}"
    return [Card("Improvement", verdict, detail)]


def finding(view: View) -> str:
    """What was measured and what came of it, for the top of the page."""
    live = view.conditions[view.live]
    text = (
        f"The engine ({view.name}) sampled {view.numbers['tokens']:,} tokens in {view.numbers['trajectories']:,} answers; the trainer "
        f"scored the same tokens again under {len(view.conditions)} conditions. With the same weights their mean k3 is "
        f"{number(live['mean_k3'])}"
    )
    floor = view.floor("mean_k3")
    text += f", {number(live['mean_k3'] / floor, 2)} times the floor" if floor else ""
    if view.replayed is not None and live["mean_k3"] > 0:
        left = view.conditions[view.replayed]["mean_k3"]
        text += f"; with the engine's routes replayed it is {number(left)}"
    return f"{text}."
