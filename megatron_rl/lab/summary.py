"""From a measurement to the numbers of summary.json: plain JSON values, the same for the same measurement.

    format, meta
    engines: by engine setting
        engine, tokens, trajectories, mean_length, reward
        floor                by what was repeated: statistics;  floor_worst: the largest of each, empty if the engine was not repeated
        conditions           by condition: condition, statistics, route_mismatch_share, layer_mismatch_share, attribution (or null), floor
        layers, margins      of `routed`, the first condition whose routers chose     (attribution.by_layer, by_margin)
        trained              the conditions that training would see: current weights, live and replayed; by condition:
                             drift, lengths, certificate, bounds_by_horizon, methods
        law                  of those, and of the same conditions with the engine's weights (probability.law)

A share or a fit that the data do not give is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .acceptance import table
from .attribution import by_layer, by_margin, explain, flips, log_ratio
from .probability import law
from .records import Measurement, Rescored, Sampled, Statistics
from .sequence import bounds_by_horizon, certificate, drift, k3, length_table, log_ratios

FORMAT = 1
TAILS = (0.01, 0.1, 1.0)
"""|d| beyond which the share of tokens is given."""


def summarise(measurement: Measurement) -> dict[str, Any]:
    """Everything summary.json holds; `megatron_rl.lab.summary` says what that is."""
    engines = {name: _engine(one, _floor_of(measurement.floor, name)) for name, one in measurement.samples.items()}
    return {"format": FORMAT, "meta": dict(measurement.meta), "engines": engines}


def statistics(d: NDArray[np.floating[Any]]) -> Statistics:
    """Of log-ratios d = log theta - log mu. mean_k3 estimates KL(mu || theta) a token, mean_k1 too, unbiased both, k3 never negative."""
    x = d.astype(np.float64)
    quantiles = {f"abs_d_p{round(100 * q)}": float(np.quantile(np.abs(x), q)) for q in (0.5, 0.9, 0.99)}
    return {
        "tokens": float(len(x)),
        "mean_k3": float(k3(x).mean()),
        "mean_k1": float(-x.mean()),
        "mean_abs_d": float(np.abs(x).mean()),
        "max_abs_d": float(np.abs(x).max()),
        "std_d": float(x.std()),
        **quantiles,
        **{f"share_beyond_{t:g}": float((np.abs(x) > t).mean()) for t in TAILS},
    }


def _floor_of(floor: Mapping[str, Statistics], engine: str) -> dict[str, Statistics]:
    return {key.removeprefix(f"{engine}/"): dict(value) for key, value in floor.items() if key.startswith(f"{engine}/")}


def worst(floor: Mapping[str, Statistics]) -> Statistics:
    """The largest of each number over all repetitions; empty where only the trainer was repeated, which is a small part of the floor."""
    if not any(what.startswith("engine") for what in floor):
        return {}
    names = {name for one in floor.values() for name in one if name != "tokens"}
    return {name: max(abs(one[name]) for one in floor.values() if name in one) for name in sorted(names)}


def _engine(sample: Sampled, floor: Mapping[str, Statistics]) -> dict[str, Any]:
    batch, highest = sample.batch, worst(floor)
    routed = next((name for name, r in sample.rescored.items() if r.condition.replay == "none" and r.routes_TLK is not None), None)
    return {
        "engine": vars(sample.engine) | {},
        "tokens": int(batch.mask_T.sum()),
        "trajectories": batch.trajectories,
        "mean_length": float(batch.lengths_S.mean()),
        "reward": float(batch.reward_S.mean()),
        "floor": dict(floor),
        "floor_worst": highest,
        "conditions": {name: _condition(sample, name, highest) for name in sample.rescored},
        "routed": routed,
        "layers": [] if routed is None else by_layer(sample, routed),
        "margins": [] if routed is None else by_margin(sample, routed),
        "trained": {name: _trained(sample, name) for name in trained(sample)},
        "law": {name: law(sample, name) for name in [*trained(sample, newest=False), *trained(sample)]},
    }


def _condition(sample: Sampled, name: str, floor: Statistics) -> dict[str, Any]:
    condition = sample.rescored[name].condition
    layers = condition.replayed_layers
    flipped = flips(sample, name)
    return {
        "condition": vars(condition) | {"replayed_layers": None if layers is None else list(layers)},
        **statistics(log_ratio(sample, name)),
        "route_mismatch_share": None if flipped is None else float(flipped.any(axis=1).mean()),
        "layer_mismatch_share": None if flipped is None else float(flipped.mean()),
        "attribution": explain(sample, name),
        "floor": {key: floor.get(key) for key in ("mean_k3", "max_abs_d", "route_mismatch_share")},
    }


def trained(sample: Sampled, *, newest: bool = True) -> list[str]:
    """The conditions that training would see: the newest weights, in the main dtype and layout, live and replayed.

    Args:
        newest: False for the engine's weights instead.
    """
    first = next(iter(sample.rescored.values())).condition
    alike = [
        r.condition
        for r in sample.rescored.values()
        if (r.condition.dtype, r.condition.layout, r.condition.quantised) == (first.dtype, first.layout, False)
        and r.condition.replayed_layers is None
    ]
    lag = max(c.lag for c in alike) if newest else 0
    return [c.name for c in alike if c.lag == lag]


def _trained(sample: Sampled, name: str) -> dict[str, Any]:
    rows = log_ratios(sample, name)
    return {
        "drift": drift(rows),
        "lengths": length_table(sample, name),
        "certificate": certificate(sample, name),
        "bounds_by_horizon": bounds_by_horizon(rows),
        "methods": table(sample, sample.rescored[name], _old(sample, sample.rescored[name])),
    }


def _old(sample: Sampled, theta: Rescored) -> Rescored:
    """The policy at the start of the step on the same routes: theta with the engine's weight version. R2 starts from live routes."""
    c = theta.condition
    replay = "none" if c.replay == "R2" else c.replay
    found = sample.find(replay=replay, dtype=c.dtype, layout=c.layout, lag=0, replayed_layers=None, quantised=c.quantised)
    return theta if found is None else found
