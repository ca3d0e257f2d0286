"""How the log-ratio depends on the token's probability: DVP's (1 - p) law (2512.23087) and three bounds (papers.md 10).

    q = softmax(z + e), |e| <= eps, p = softmax(z) at the sampled token;  d = log q - log p
    exact     -log(p + (1-p) exp(2 eps)) <= d <= -log(p + (1-p) exp(-2 eps))
    slope     |d| <= (exp(2 eps) - 1) (1 - p)
    smaller   |d| <= 2 eps (1 - min(p, q))
    naive     |d| <= 2 eps (1 - p)                    not a theorem: its lower side can fail [I]

eps is measured at each position, as half the spread of log q - log p over the engine's candidates (`Rescored.noise_T`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .records import Sampled

Floats = NDArray[np.float64]
EDGES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Of the bins of 1 - p."""
ROUNDING = 4e-6
"""fp32 log-probs: what a bound may be missed by, times 1 + |log p|."""
FEWEST = 5
"""Tokens that a bin needs to enter the fit."""


def law(sample: Sampled, name: str) -> dict[str, Any]:
    """Bins of 1 - p with the mean |d| in each, the fitted log-log slope (1 is DVP's law), and the three bounds on the data."""
    batch, scored = sample.batch, sample.rescored[name]
    mu = batch.mu_T[batch.mask_T].astype(np.float64)
    theta = scored.logp_T[batch.mask_T].astype(np.float64)
    rest, d = -np.expm1(np.minimum(mu, 0.0)), theta - mu
    bins = []
    for low, high in pairwise(EDGES):
        inside = (rest >= low) & ((rest < high) | (high == EDGES[-1]))
        if inside.any():
            mean_rest, mean_abs = float(rest[inside].mean()), float(np.abs(d[inside]).mean())
            ratio = mean_abs / mean_rest if mean_rest > 0 else None
            bins.append(
                {"from": low, "to": high, "tokens": int(inside.sum()), "mean_rest": mean_rest, "mean_abs_d": mean_abs, "ratio": ratio}
            )
    noise = None if scored.noise_T is None else scored.noise_T[batch.mask_T].astype(np.float64)
    return {"bins": bins, **_slope(bins), "bounds": None if noise is None else _check(mu, theta, noise), "needed_noise": _needed(mu, d)}


def _slope(bins: list[dict[str, Any]]) -> dict[str, float | None]:
    """log mean|d| = slope * log mean(1 - p) + log factor, weighted by the tokens of each bin."""
    points = [b for b in bins if b["tokens"] >= FEWEST and b["mean_rest"] > 0 and b["mean_abs_d"] > 0]
    if len(points) < 2:
        return {"slope": None, "factor": None}
    x, y = (np.log([b[key] for b in points]) for key in ("mean_rest", "mean_abs_d"))
    slope, constant = np.polyfit(x, y, 1, w=np.sqrt([b["tokens"] for b in points]))
    return {"slope": float(slope), "factor": float(np.exp(constant))}


def limits(mu: Floats, theta: Floats, noise: Floats) -> dict[str, tuple[Floats, Floats]]:
    """Each bound's (lower, upper) limit of d, token by token."""
    p, q = np.exp(mu), np.exp(theta)
    spread = np.expm1(2 * noise) * (1 - p)
    smaller, naive = 2 * noise * (1 - np.minimum(p, q)), 2 * noise * (1 - p)
    return {
        "exact": (-np.log(p + (1 - p) * np.exp(2 * noise)), -np.log(p + (1 - p) * np.exp(-2 * noise))),
        "slope": (-spread, spread),
        "smaller": (-smaller, smaller),
        "naive": (-naive, naive),
    }


def _check(mu: Floats, theta: Floats, noise: Floats) -> dict[str, Any]:
    """For each bound: the share of tokens inside it, and how much of it they use."""
    d, slack = theta - mu, ROUNDING * (1 + np.abs(mu))
    out: dict[str, Any] = {"noise_mean": float(noise.mean()), "noise_max": float(noise.max())}
    for name, (low, high) in limits(mu, theta, noise).items():
        used = np.abs(d) / np.maximum(np.where(d > 0, high, -low), slack)
        out[name] = {
            "inside_share": float(((d >= low - slack) & (d <= high + slack)).mean()),
            "used_median": float(np.median(used)),
            "used_p99": float(np.quantile(used, 0.99)),
        }
    return out


def _needed(mu: Floats, d: Floats) -> dict[str, float | None]:
    """The least eps for which the exact bound holds, over the tokens: what the logits must differ by at least. None is no finite one."""
    p = np.exp(mu)
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = (np.exp(-d) - p) / (1 - p)
        needed = np.where((inner > 0) & (p < 1), np.abs(np.log(inner)) / 2, np.inf)
    needed = np.where(d == 0, 0.0, needed)
    finite = needed[np.isfinite(needed)]
    found = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {k: float(np.quantile(finite, at)) if finite.size else None for k, at in found.items()} | {
        "infinite": float(needed.size - finite.size)
    }
