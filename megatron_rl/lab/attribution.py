"""Why each token's log-ratio is what it is: d = routing + staleness + numerics, by telescoping re-scorings.

    d          log theta - log mu: the trainer under a condition, less the engine
    routing    what changes when the engine's routes are replayed
    staleness  what changes when the engine's weight version is taken
    numerics   what is left with the engine's routes and the engine's weights: kernels, dtypes, quantisation, batch composition

Each part is the difference of two scorings one after the other, so the parts add up to d token by token. Two orders are reported, since
routing and staleness need not commute. Staleness removed first takes along the routes that newer weights choose otherwise, and leaves to
routing what the engines disagree on with the same weights: each part then has one cause, which is why this order is the main one. Routing
removed first takes both. Numerics comes last: the engine cannot be run with the trainer's kernels.

Shares of variance are cov(part, d) / var(d), shares of the tail are of sum |d| over the tokens with the largest |d|; both add up to 1
and may be negative. Legend: M sampled tokens, L MoE layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .records import Condition, Sampled, otherwise

Part = Literal["routing", "staleness", "numerics"]
Floats = NDArray[np.float64]
ORDERS: tuple[tuple[Part, ...], ...] = (("staleness", "routing", "numerics"), ("routing", "staleness", "numerics"))
"""What is removed first, second and last; the first order is the main one."""
TAIL = 0.01
"""Share of the tokens that are the tail."""


@dataclass(frozen=True)
class Attribution:
    """The parts of every sampled token's log-ratio, in one order of removal."""

    order: tuple[Part, ...]
    d_M: Floats
    parts: Mapping[str, Floats]
    """[M] each; they add up to d_M."""


def log_ratio(sample: Sampled, name: str) -> Floats:
    """[M] log theta - log mu of the sampled tokens under a condition."""
    batch = sample.batch
    return (sample.rescored[name].logp_T.astype(np.float64) - batch.mu_T)[batch.mask_T]


def attribute(sample: Sampled, name: str, order: Sequence[Part] = ORDERS[0]) -> Attribution | None:
    """The attribution of a condition's log-ratio; None where a scoring that it needs was not measured."""
    removed: set[str] = set()
    ladder = [log_ratio(sample, name)]
    for part in order[:-1]:
        removed.add(part)
        found = _find(sample, _without(sample.rescored[name].condition, removed, moe=sample.batch.routes_TLK is not None))
        if found is None:
            return None
        ladder.append(log_ratio(sample, found))
    assert order[-1] == "numerics", "the engine cannot be run with the trainer's kernels"
    ladder.append(np.zeros_like(ladder[0]))
    parts: dict[str, Floats] = {part: upper - lower for part, upper, lower in zip(order, ladder[:-1], ladder[1:], strict=True)}
    return Attribution(tuple(order), ladder[0], parts)


def _without(condition: Condition, removed: set[str], *, moe: bool) -> Condition:
    """The condition with the engine's routes, or the engine's weight version, or both."""
    if "routing" in removed and moe:
        condition = dataclasses.replace(condition, replay="R3", replayed_layers=None)
    return dataclasses.replace(condition, lag=0) if "staleness" in removed else condition


def _find(sample: Sampled, wanted: Condition) -> str | None:
    """The name of a measured condition like that one. R2 at lag 0 replays what the trainer itself chose: it is `none`."""
    if wanted.replay == "R2" and wanted.lag == 0:
        wanted = dataclasses.replace(wanted, replay="none")
    fields = {k: v for k, v in dataclasses.asdict(wanted).items() if k != "name"}
    found = sample.find(**fields)
    return None if found is None else found.condition.name


def shares(attribution: Attribution) -> dict[str, Any]:
    """Per part: mean, standard deviation, share of variance, share of the tail. Shares are None where d does not vary."""
    d = attribution.d_M
    variance = float(d.var())
    count = max(1, round(TAIL * len(d)))
    tail = np.argsort(-np.abs(d), kind="stable")[:count]
    mass, sign = float(np.abs(d[tail]).sum()), np.sign(d[tail])
    return {
        "order": list(attribution.order),
        "mean": {k: float(x.mean()) for k, x in attribution.parts.items()},
        "std": {k: float(x.std()) for k, x in attribution.parts.items()},
        "variance_share": {k: _share(_cov(x, d), variance) for k, x in attribution.parts.items()},
        "tail_share": {k: _share(float((x[tail] * sign).sum()), mass) for k, x in attribution.parts.items()},
        "tail_tokens": count,
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def explain(sample: Sampled, name: str) -> dict[str, Any] | None:
    """Both orders, how far they are apart, and what staleness and numerics are made of in the first; None for what cannot be attributed."""
    both = [attribute(sample, name, order) for order in ORDERS]
    first, second = both
    if first is None:
        return None
    gap = None if second is None else float(np.abs(first.parts["routing"] - second.parts["routing"]).max())
    return {
        "orders": [shares(one) for one in both if one is not None],
        "largest_difference_between_orders": gap,
        "commute": gap is not None and gap <= 1e-6,
        "within": _within(sample, name, first),
    }


def _within(sample: Sampled, name: str, whole: Attribution) -> dict[str, dict[str, float | None]]:
    """Shares of the variance of d, of the pieces of staleness and numerics that could be told apart."""
    condition = sample.rescored[name].condition
    base = _without(condition, {"routing", "staleness"}, moe=sample.batch.routes_TLK is not None)
    pieces: dict[str, dict[str, tuple[Condition, Condition]]] = {
        # Newer weights choose other routes: R2 keeps those that the trainer chose with the engine's weights.
        "staleness": {"through_routes": (condition, dataclasses.replace(condition, replay="R2"))} if condition.replay == "none" else {},
        "numerics": {
            "trainer_dtype": (base, dataclasses.replace(base, dtype="fp32")),
            "quantisation": (base, dataclasses.replace(base, quantised=True)),
        },
    }
    d = whole.d_M
    variance, out = float(d.var()), {}
    for part, found in pieces.items():
        values: dict[str, Floats] = {}
        for piece, (upper, lower) in found.items():
            names = _find(sample, upper), _find(sample, lower)
            if names[0] is not None and names[1] is not None and names[0] != names[1]:
                values[piece] = log_ratio(sample, names[0]) - log_ratio(sample, names[1])
        if values:
            values["rest"] = whole.parts[part] - sum(values.values(), np.zeros_like(d))
            out[part] = {k: _share(_cov(x, d), variance) for k, x in values.items()}
    return out


# -- routes ------------------------------------------------------------------------------------------------------------------------


def flips(sample: Sampled, name: str) -> NDArray[np.bool_] | None:
    """[T, L] whether the set of experts that a forward used differs from the engine's; None for a dense model."""
    given, used = sample.batch.routes_TLK, sample.rescored[name].routes_TLK
    if given is None or used is None:
        return None
    return otherwise(given, used)


def by_layer(sample: Sampled, name: str) -> list[dict[str, Any]]:
    """One row a MoE layer, for a condition whose routers chose: how often it flips, and what replaying it alone or all up to it removes.

    removed_alone, removed_up_to: shares of the variance of routing = d(live) - d(replayed), as covariances with it. Up to the last
    layer everything is removed; alone, a layer that matters only through later routers' choices shows that too.
    """
    flipped, scored = flips(sample, name), sample.rescored[name]
    whole = attribute(sample, name)
    if flipped is None or whole is None:
        return []
    routing, live = whole.parts["routing"], log_ratio(sample, name)
    rows = []
    for layer in range(flipped.shape[1]):
        at = flipped[:, layer]
        margin = None if scored.margin_TL is None else scored.margin_TL[:, layer]
        row: dict[str, Any] = {"layer": layer, "flip_share": float(at.mean())}
        row["margin_at_flips"] = float(margin[at].mean()) if margin is not None and at.any() else None
        row["margin_elsewhere"] = float(margin[~at].mean()) if margin is not None and not at.all() else None
        for key, layers in (("removed_alone", (layer,)), ("removed_up_to", tuple(range(layer + 1)))):
            complete = len(layers) == flipped.shape[1]
            wanted = dataclasses.replace(scored.condition, replay="R3", replayed_layers=None if complete else layers)
            found = _find(sample, wanted)
            removed = None if found is None else live - log_ratio(sample, found)
            row[key] = None if removed is None else _share(_cov(removed, routing), float(routing.var()))
            row[f"mean_abs_{key}"] = None if removed is None else float(np.abs(removed).mean())
        rows.append(row)
    return rows


def _cov(a: Floats, b: Floats) -> float:
    return float(((a - a.mean()) * (b - b.mean())).mean())


def by_margin(sample: Sampled, name: str, bins: int = 10) -> list[dict[str, float]]:
    """Rows of equally many sampled tokens, by the least margin of any layer at the token: how often it flips, and how large d gets."""
    scored, flipped, whole = sample.rescored[name], flips(sample, name), attribute(sample, name)
    if scored.margin_TL is None or flipped is None or whole is None:
        return []
    mask = sample.batch.mask_T
    least = np.min(scored.margin_TL[mask], axis=1)
    any_flip: NDArray[np.bool_] = np.asarray(flipped[mask].any(axis=1))
    parts = np.array_split(np.argsort(least, kind="stable"), min(bins, len(least)))
    return [
        {
            "tokens": len(rows),
            "margin_from": float(least[rows].min()),
            "margin_to": float(least[rows].max()),
            "flip_share": float(any_flip[rows].mean()),
            "mean_abs_routing": float(np.abs(whole.parts["routing"][rows]).mean()),
            "mean_abs_d": float(np.abs(whole.d_M[rows]).mean()),
        }
        for rows in parts
    ]
