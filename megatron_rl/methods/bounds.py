"""Bounds on the error of the first-order surrogate, and what they certify (papers.md 3.2, 4, 5, 8.3). Plain floats in, plain floats out.

    Error = J(theta) - J(mu) - L,   L the surrogate;   L > bound certifies J(theta) > J(mu).   Rewards in [0, 1] unless xi says otherwise.

The inputs may be exact (a tree MDP), sampled, or from a live run; a bound is only as good as the maxima that went into it. TRM is
2512.23075 [F], DPPO 2602.04879 [F], CPPO 2606.10968 [F]; `ascent` is of the series "When speed kills stability" [F].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tokens import LOG_RATIO_LIMIT


@dataclass(frozen=True)
class Divergences:
    """How far theta is from mu, over contexts c of at most T tokens."""

    horizon: int
    """T, tokens."""
    tv_max: float
    """epsilon = max_c TV(mu, theta)(c)."""
    kl_max: float
    """delta = max_c KL(mu || theta)(c), nats."""
    kl_sequence: float
    """sum_t E_mu KL(c_t), nats."""
    tv_sequence: float
    """TV of the two laws of whole sequences."""
    tv_mean: Sequence[float] | None = None
    """E_mu[TV(c_t)] for t = 1 .. T; without it the adaptive bounds are not computed."""

    def __post_init__(self) -> None:
        for name in ("tv_max", "kl_max", "kl_sequence", "tv_sequence"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must not be negative")
        if self.horizon < 1:
            raise ValueError(f"horizon: {self.horizon} must be at least 1")
        if self.tv_mean is not None and len(self.tv_mean) != self.horizon:
            raise ValueError(f"tv_mean: {len(self.tv_mean)} values for horizon {self.horizon}; give one a position")


def sampled(log_ratios: Sequence[NDArray[Any]]) -> Divergences:
    """Estimates from sampled tokens alone, for a live run; what the engine would have to send for exact ones is the whole vocabulary.

        tv_mean[t]  mean over sequences of |rho_t - 1| / 2        unbiased: E_mu |rho - 1| = 2 TV
        kl_sequence mean over sequences of sum_t k3(d_t)          unbiased
        tv_sequence mean over sequences of |rho_1:T - 1| / 2      unbiased, of high variance
        tv_max, kl_max  largest |rho - 1| / 2 and k2 of any token: maxima over samples, neither above nor below the true ones [I]

    Args:
        log_ratios: for each sequence, [n] log theta - log mu of its loss tokens; at least one token in all.
    """
    d = [np.clip(np.asarray(x, dtype=np.float64), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) for x in log_ratios if len(x)]
    if not d:
        raise ValueError("log_ratios: no token at all; give at least one sequence")
    horizon, every = max(len(x) for x in d), np.concatenate(d)
    tv_at = [0.5 * float(np.mean([abs(np.expm1(x[t])) if t < len(x) else 0.0 for x in d])) for t in range(horizon)]
    whole = np.array([np.clip(x.sum(), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) for x in d])
    return Divergences(
        horizon=horizon,
        tv_max=min(1.0, 0.5 * float(np.abs(np.expm1(every)).max())),
        kl_max=float((every**2).max()) / 2,
        kl_sequence=float(np.mean([(np.expm1(x) - x).sum() for x in d])),
        tv_sequence=min(1.0, 0.5 * float(np.abs(np.expm1(whole)).mean())),
        tv_mean=tv_at,
    )


def _root(kl: float) -> float:
    """Pinsker: TV <= sqrt(KL / 2)."""
    return math.sqrt(kl / 2)


def classical(d: Divergences) -> float:
    """2 T (T - 1) epsilon^2."""
    return 2 * d.horizon * (d.horizon - 1) * d.tv_max**2


def pinsker_marginal_kl(d: Divergences) -> float:
    """4 min(1, sqrt(delta/2)) sum_t min(1, sqrt((t-1) delta/2))."""
    return 4 * min(1.0, _root(d.kl_max)) * sum(min(1.0, _root(t * d.kl_max)) for t in range(d.horizon))


def pinsker_marginal_tv(d: Divergences) -> float:
    """4 min(1, epsilon) sum_t min(1, sqrt((t-1) delta/2))."""
    return 4 * min(1.0, d.tv_max) * sum(min(1.0, _root(t * d.kl_max)) for t in range(d.horizon))


def mixed_kl(d: Divergences) -> float:
    """4 T min(1, sqrt(delta/2)) min(1, sqrt(KL_seq/2))."""
    return 4 * d.horizon * min(1.0, _root(d.kl_max)) * min(1.0, _root(d.kl_sequence))


def mixed_tv(d: Divergences) -> float:
    """4 T min(1, epsilon) min(1, TV_seq)."""
    return 4 * d.horizon * min(1.0, d.tv_max) * min(1.0, d.tv_sequence)


def coupling(d: Divergences) -> float:
    """4 min(1, epsilon) sum_t min(1, (t-1) epsilon)."""
    return 4 * min(1.0, d.tv_max) * sum(min(1.0, t * d.tv_max) for t in range(d.horizon))


def _adaptive(d: Divergences, use_tv: bool, use_kl: bool) -> float:
    assert d.tv_mean is not None, "the adaptive bounds need tv_mean"
    total = 0.0
    for t, mean in enumerate(d.tv_mean, start=1):
        left = d.horizon - t
        reach = min(1.0, left * d.tv_max if use_tv else 1.0, _root(left * d.kl_max) if use_kl else 1.0)
        total += mean * reach
    return 4 * total


def adaptive_kl(d: Divergences) -> float:
    """4 sum_t Dbar_t min(1, sqrt((T-t) delta/2))."""
    return _adaptive(d, use_tv=False, use_kl=True)


def adaptive_tv(d: Divergences) -> float:
    """4 sum_t Dbar_t min(1, (T-t) epsilon)."""
    return _adaptive(d, use_tv=True, use_kl=False)


def adaptive(d: Divergences) -> float:
    """4 sum_t Dbar_t min(1, (T-t) epsilon, sqrt((T-t) delta/2)); at most the other two adaptive bounds."""
    return _adaptive(d, use_tv=True, use_kl=True)


def all_bounds(d: Divergences) -> dict[str, float]:
    """The TRM family by name: nine with tv_mean, six without."""
    plain = (classical, pinsker_marginal_kl, pinsker_marginal_tv, mixed_kl, mixed_tv, coupling)
    with_mean = () if d.tv_mean is None else (adaptive_kl, adaptive_tv, adaptive)
    return {bound.__name__: bound(d) for bound in (*plain, *with_mean)}


def best(d: Divergences) -> tuple[str, float]:
    """B*: the name and value of the smallest. A surrogate L > B* certifies J(theta) > J(mu)."""
    bounds = all_bounds(d)
    name = min(bounds, key=bounds.__getitem__)
    return name, bounds[name]


def dppo(horizon: int, xi: float, tv_max: float, tv_sum: float) -> float:
    """DPPO: J(theta) - J(mu) >= L' - this.  min( 2 xi T (T-1) TVmax^2, 4 xi E_mu[sum_t TV(c_t)] ), xi = max |R|."""
    return min(2 * xi * horizon * (horizon - 1) * tv_max**2, 4 * xi * tv_sum)


def cppo(horizon: int, xi: float, largest_limit: float, budget: float) -> float:
    """CPPO: J(theta) - J(mu) >= L' - this, when every token obeys its rule.  2 xi T (T-1) lbar budget, lbar = max_t c_t / w_t."""
    return 2 * xi * horizon * (horizon - 1) * largest_limit * budget


def cppo_suffix(xi: float, tv: Sequence[float], limits: Sequence[float]) -> float:
    """CPPO: |L' - (J(theta) - J(mu))| <= 4 xi sum_t u_t sum_{j>t} l_j, u_t >= E TV at t and l_j >= the TV of every context at j."""
    if len(tv) != len(limits):
        raise ValueError(f"limits: {len(limits)} values for {len(tv)} positions; give one a position")
    after = [sum(limits[t + 1 :]) for t in range(len(limits))]
    return 4 * xi * sum(u * rest for u, rest in zip(tv, after, strict=True))


def ascent(step: float, smoothness: float, gradient: Sequence[float], bias: Sequence[float], variance: float) -> float:
    """Least expected gain of one step of stochastic gradient ascent with a biased gradient, on a smooth J (papers.md 8.3):

        E J(theta + eta g) - J(theta) >= eta (1 - L eta/2) |grad J|^2 + eta (1 - L eta) <grad J, b> - (L eta^2 / 2)(Var + |b|^2)

    Args:
        step: eta.
        smoothness: L, a Lipschitz constant of grad J.
        gradient: grad J(theta).
        bias: b = E g - grad J.
        variance: E |g - E g|^2.
    """
    square = sum(x * x for x in gradient)
    inner = sum(x * b for x, b in zip(gradient, bias, strict=True))
    noise = variance + sum(b * b for b in bias)
    return step * (1 - smoothness * step / 2) * square + step * (1 - smoothness * step) * inner - smoothness * step**2 / 2 * noise
