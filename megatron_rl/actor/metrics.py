"""Metrics on their way from micro-batches to one number: means as (numerator, denominator) pairs, plain totals, and maxima."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types import Metric, as_metric
from .parallel import Mesh


@dataclass
class Metrics:
    """What one rank has gathered so far."""

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        means: Mapping[str, Metric] | None = None,
        totals: Mapping[str, Tensor] | None = None,
        maxima: Mapping[str, Tensor] | None = None,
    ) -> Metrics:
        """Adds one micro-batch's; returns self."""
        self._merge(
            {k: (float(n), float(d)) for k, (n, d) in (means or {}).items()},
            {k: float(v) for k, v in (totals or {}).items()},
            {k: float(v) for k, v in (maxima or {}).items()},
        )
        return self

    def merge(self, other: Metrics) -> Metrics:
        """Adds another's; returns self."""
        self._merge(other.means, other.totals, other.maxima)
        return self

    def _merge(self, means: Mapping[str, tuple[float, float]], totals: Mapping[str, float], maxima: Mapping[str, float]) -> None:
        for name, (n, d) in means.items():
            before = self.means.get(name, (0.0, 0.0))
            self.means[name] = (before[0] + n, before[1] + d)
        for name, value in totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        for name, value in maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -torch.inf), value)


def reduce(mesh: Mesh, mine: Metrics, *, counts: bool | None = None) -> dict[str, float]:
    """One number a name, the same on every rank: sum of numerators over sum of denominators, total, or largest.

    `counts` says whether this rank's share counts; None takes `mesh.reports`.
    A mean whose denominator is 0 is left out: there is nothing to say.
    """
    everyone = Metrics()
    for part in mesh.gather(mine if (mesh.reports if counts is None else counts) else Metrics()):
        everyone.merge(part)
    means = {name: n / d for name, (n, d) in everyone.means.items() if d != 0}
    return means | everyone.totals | everyone.maxima


def mismatch(logp_T: Tensor, behaviour_logp_T: Tensor, mask_T: Tensor, suffix: str) -> tuple[dict[str, Metric], dict[str, Tensor]]:
    """How far the trainer's log-probs are from the engine's, d = trainer - engine.

    Returns:
        mean |d| and mean k3 = e^d - 1 - d (papers.md 1.3) as pairs, and max |d|; names end in `suffix`.
    """
    d_M = (logp_T.detach() - behaviour_logp_T)[mask_T].double()
    count = torch.tensor(float(d_M.numel()))
    sums = {
        f"mismatch/mean_abs_{suffix}": as_metric(d_M.abs().sum(), count),
        f"mismatch/k3_{suffix}": as_metric((d_M.exp() - 1 - d_M).sum(), count),
    }
    return sums, {f"mismatch/max_abs_{suffix}": d_M.abs().max()} if d_M.numel() else {}
