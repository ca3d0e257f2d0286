"""What the token gaps add up to: prefix drift, length, and the bounds that they enter.

S_t = d_1 + ... + d_t        the log of the prefix ratio W_t
RMS S_t ~ t^H                H = 1/2: a random walk, gaps independent from token to token; H = 1: a drift, gaps of one sign
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..methods import bounds
from ..methods.tokens import LOG_RATIO_LIMIT
from .records import Sampled

Floats = NDArray[np.float64]
FEWEST = 4
"""Sequences that must reach a length for its spread to be fitted."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def log_ratios(sample: Sampled, name: str) -> list[Floats]:
    """[n] log theta - log mu of the sampled tokens of each trajectory."""
    batch = sample.batch
    return [x for x in batch.split(sample.rescored[name].logp_T.astype(np.float64) - batch.mu_T) if len(x)]


def points(longest: int, count: int = 24) -> list[int]:
    """About `count` lengths from 1 to longest, evenly spaced in the logarithm."""
    return sorted({round(x) for x in np.geomspace(1, longest, count)})


def drift(rows: Sequence[Floats]) -> dict[str, Any]:
    """How the prefix sums spread with t: a fan of quantiles, the fitted exponent, and what a token adds on average."""
    sums = [np.cumsum(x) for x in rows]
    longest = max(len(x) for x in rows)
    fan = []
    for t in points(longest):
        here = np.array([s[t - 1] for s in sums if len(s) >= t])
        row: dict[str, float] = {"t": t, "sequences": len(here), "mean": float(here.mean()), "rms": float(np.sqrt((here**2).mean()))}
        fan.append(row | {f"q{round(100 * q):02d}": float(v) for q, v in zip(QUANTILES, np.quantile(here, QUANTILES), strict=True)})
    every = np.concatenate(rows)
    return {
        "fan": fan,
        "exponent": _exponent(fan),
        "mean_per_token": float(every.mean()),
        "std_per_token": float(every.std()),
        "autocorrelation": _autocorrelation(rows),
    }


def _exponent(fan: Sequence[dict[str, float]]) -> float | None:
    """H of RMS S_t ~ t^H, each length weighted by the sequences that reach it."""
    used = [row for row in fan if row["sequences"] >= FEWEST and row["rms"] > 0]
    if len(used) < 3:
        return None
    x, y, w = (np.array([row[key] for row in used], dtype=np.float64) for key in ("t", "rms", "sequences"))
    return float(np.polyfit(np.log(x), np.log(y), 1, w=np.sqrt(w))[0])


def _autocorrelation(rows: Sequence[Floats]) -> float | None:
    """Of a token's gap with the next one's, over all sequences; 0 for a random walk."""
    first, second = np.concatenate([x[:-1] for x in rows]), np.concatenate([x[1:] for x in rows])
    if len(first) < 2 or not (first.std() > 0 and second.std() > 0):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def length_table(sample: Sampled, name: str, bins: int = 10) -> list[dict[str, float]]:
    """Rows of equally many trajectories, from short to long (deciles, where there are ten)."""
    batch = sample.batch
    kept = [i for i, n in enumerate(batch.lengths_S) if n]
    rows = log_ratios(sample, name)
    order = np.argsort([len(x) for x in rows], kind="stable")
    table = []
    for part in np.array_split(order, min(bins, len(order))):
        d = [rows[i] for i in part]
        every, whole = np.concatenate(d), np.array([x.sum() for x in d])
        table.append(
            {
                "sequences": len(part),
                "length_from": float(len(d[0])),
                "length_to": float(len(d[-1])),
                "mean_k3": float(k3(every).mean()),
                "max_abs_d": float(np.abs(every).max()),
                "mean_abs_sum": float(np.abs(whole).mean()),
                "mean_sum": float(whole.mean()),
                "reward": float(np.mean([batch.reward_S[kept[i]] for i in part])),
            }
        )
    return table


def k3(d: Floats) -> Floats:
    """exp(d) - 1 - d, d clamped as everywhere."""
    d = np.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return np.expm1(d) - d


def certificate(sample: Sampled, name: str) -> dict[str, Any]:
    """TRM's nine bounds from the sampled tokens, their minimum B*, and whether the surrogate exceeds it (papers.md 3.2).

        L' = E_mu[R sum_t (rho_t - 1)],  R in [0, 1];   L' > B* certifies J(theta) > J(mu)

    The maxima that enter the bounds are over samples, so that a certificate is only as good as they are.

    Returns:
        Rewards outside [0, 1] leave surrogate and certified None: the bounds are for [0, 1].
    """
    rows, batch = log_ratios(sample, name), sample.batch
    found = bounds.all_bounds(bounds.sampled(rows))
    least = min(found, key=found.__getitem__)
    rewards = batch.reward_S[batch.lengths_S > 0].astype(np.float64)
    moves = np.array([np.expm1(np.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum() for x in rows])
    known = bool(((rewards >= 0) & (rewards <= 1)).all())
    surrogate = float((rewards * moves).mean()) if known else None
    return {
        "bounds": found,
        "best": least,
        "best_value": found[least],
        "surrogate": surrogate,
        "surrogate_standard_error": float((rewards * moves).std() / np.sqrt(len(moves))) if known else None,
        "certified": None if surrogate is None else surrogate > found[least],
    }


def bounds_by_horizon(rows: Sequence[Floats]) -> list[dict[str, float]]:
    """The nine bounds of the same sequences cut at T tokens, for growing T."""
    longest = max(len(x) for x in rows)
    return [{"horizon": t, **bounds.all_bounds(bounds.sampled([x[:t] for x in rows]))} for t in points(longest, 12)]
