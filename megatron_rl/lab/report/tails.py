"""How heavy the tails of log-ratios are: the share of tokens beyond x, for any sets of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...page.figure import NEUTRAL, Axis, Figure, Series
from .view import Floats, View

STEPS = 90
DECADES = 4
"""Below the largest |d| the curves reach this far."""
FLOOR = (("abs_d_p50", 0.5), ("abs_d_p90", 0.1), ("abs_d_p99", 0.01))
"""What is known of the floor's own tail: its quantiles."""


def tails_figure(
    key: str, title: str, note: str, values: Mapping[str, Floats], colors: Mapping[str, int] | None = None, floor: View | None = None
) -> Figure:
    """Curves of P(|d| >= x).

    Args:
        values: [M] log-ratios by label.
        colors: of a label; without them the palette in order.
        floor: the engine setting whose floor is drawn too.
    """
    sizes = {name: np.sort(np.abs(d)) for name, d in values.items()}
    positive = np.concatenate([d[d > 0] for d in sizes.values()])
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (1e-9, 1.0)
    x = np.geomspace(max(low, high * 10.0**-DECADES), high, STEPS)
    series = []
    for i, (name, d) in enumerate(sizes.items()):
        share = 1 - np.searchsorted(d, x, side="left") / len(d)
        series.append(Series(name, x.tolist(), [float(s) or None for s in share], "line", (colors or {}).get(name, i)))
    known = [(at, share) for name, share in FLOOR if floor is not None and (at := floor.floor(name))]
    if known:
        series.append(Series("floor", [at for at, _ in known], [share for _, share in known], "line", NEUTRAL, dashed=True))
    return Figure(key, title, note, series, Axis("|d|, nats", log=True), Axis("share of tokens", log=True))
