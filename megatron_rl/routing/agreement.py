"""How far two routings of the same tokens agree, layer by layer. Pure; every number is a sum, so that ranks and micro-batches add up.

    exact      the two sets of K experts are equal                       overlap  |A and B| / K
    jaccard    |A and B| / |A or B|                                      margin   gap between the K-th and the (K+1)-th live score
    load       tokens an expert gets; violation = largest / mean - 1     first    the shallowest layer that differs

The live routing is the trainer's own choice, the given one came with the rollout or from an earlier pass. Rows are the tokens that pass a
rank's routers: a sequence-parallel slice of a context-parallel shard of the pack.

Legend: R rows, K experts a token, E experts, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int32).max
"""First divergent layer of a token that no layer routes otherwise."""


@dataclass(frozen=True)
class LayerCounts:
    """Sums over the real rows of one layer. Add those of other rows of the same layer with `+`."""

    tokens: float
    exact: float
    overlap: float
    """Sum over tokens of |A and B| / K."""
    jaccard: float
    margin_at_flips: float
    """Sum over tokens whose set differs, in units of the scores (log-probabilities of the router)."""
    margin_elsewhere: float
    live_load_E: Tensor
    """fp64 tokens each expert would get."""
    given_load_E: Tensor
    """fp64 tokens each expert was given."""

    def __add__(self, other: LayerCounts) -> LayerCounts:
        return LayerCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def compare(live_RK: Tensor, given_RK: Tensor, log_scores_RE: Tensor, real_R: Tensor) -> tuple[LayerCounts, Tensor]:
    """One layer's counts, and bool [R] whether a row's set differs (False in padding).

    Args:
        live_RK: int64, the router's own choice.
        given_RK: int64, what it is compared with; distinct experts a row.
        log_scores_RE: fp32, natural log of the router's normalised scores.
        real_R: bool, False in padding.
    """
    k, experts = live_RK.shape[1], log_scores_RE.shape[1]
    live_MK, given_MK, scores_ME = live_RK[real_R], given_RK[real_R].long(), log_scores_RE[real_R]
    shared_M = (live_MK[:, :, None] == given_MK[:, None, :]).sum(dim=(1, 2)).double()
    differs_M = shared_M < k
    margin_M = margins(scores_ME, live_MK).double()
    differs_R = torch.zeros_like(real_R)
    differs_R[real_R] = differs_M
    return (
        LayerCounts(
            tokens=float(shared_M.numel()),
            exact=float((~differs_M).sum()),
            overlap=float(shared_M.sum()) / k,
            jaccard=float((shared_M / (2 * k - shared_M)).sum()),
            margin_at_flips=float(margin_M[differs_M].sum()),
            margin_elsewhere=float(margin_M[~differs_M].sum()),
            live_load_E=torch.bincount(live_MK.flatten(), minlength=experts).double().cpu(),
            given_load_E=torch.bincount(given_MK.flatten(), minlength=experts).double().cpu(),
        ),
        differs_R,
    )


def margins(scores_ME: Tensor, live_MK: Tensor) -> Tensor:
    """[M] the least chosen score minus the best of the others; 0 where all experts are chosen.

    With an expert bias or groups the choice is not by score alone, and a margin may be negative.
    """
    if live_MK.shape[1] == scores_ME.shape[1]:
        return scores_ME.new_zeros(scores_ME.shape[0])
    rest_ME = scores_ME.scatter(1, live_MK, -torch.inf)
    return scores_ME.gather(1, live_MK).amin(dim=1) - rest_ME.amax(dim=1)


def summary(layers: dict[int, LayerCounts], prefix: str = "routing", *, by_layer: bool = True) -> dict[str, float]:
    """Named metrics, in all and per layer, from every layer's counts (keys: depth among the MoE layers, from 0).

    A mean over nothing is left out: no flips, no margin at flips.
    """
    whole = {n: c for n, c in sorted(layers.items()) if c.tokens}
    if not whole:
        return {}
    pairs: dict[str, tuple[float, float]] = {}
    for name in ("exact", "overlap", "jaccard"):
        pairs[f"{prefix}/{name}"] = (sum(getattr(c, name) for c in whole.values()), sum(c.tokens for c in whole.values()))
        if by_layer:
            pairs |= {f"{prefix}/{name}/layer_{n:02d}": (getattr(c, name), c.tokens) for n, c in whole.items()}
    flips = sum(c.tokens - c.exact for c in whole.values())
    pairs[f"{prefix}/margin_at_flips"] = (sum(c.margin_at_flips for c in whole.values()), flips)
    pairs[f"{prefix}/margin_elsewhere"] = (sum(c.margin_elsewhere for c in whole.values()), sum(c.exact for c in whole.values()))
    for side in ("live", "given"):
        worst = [violation(getattr(c, f"{side}_load_E")) for c in whole.values()]
        pairs[f"{prefix}/load_violation_{side}"] = (sum(worst), float(len(worst)))
    return {name: total / count for name, (total, count) in pairs.items() if count}


def violation(load_E: Tensor) -> float:
    """Largest load over the mean load, less 1; 0 is balance."""
    return float(load_E.max() / load_E.mean() - 1) if float(load_E.sum()) else 0.0


def by_flips(flips: list[Tensor], log_ratios: list[Tensor], groups: tuple[int, ...] = (0, 1, 2, 4)) -> dict[str, float]:
    """Log-ratio statistics by how many layers route a token, and its prefix, otherwise.

    Args:
        flips: for each sequence, [n] number of layers that differ at each loss token's position.
        log_ratios: for each sequence, [n] d = log trainer - log engine of the loss tokens.
        groups: lower ends of the groups of flipped layers; the last is open.

    Returns:
        routing/abs_d/flips_<range>: mean |d| of tokens by their own flips.
        routing/prefix_drift/flips_<range>: mean |sum of d| over the prefix up to and including a token, by the flips in that prefix.
    """
    if not flips:
        return {}
    own, d = torch.cat(flips).double(), torch.cat(log_ratios).double()
    before = torch.cat([f.double().cumsum(0) for f in flips])
    drift = torch.cat([x.double().cumsum(0) for x in log_ratios])
    found: dict[str, float] = {}
    for low, high in zip(groups, (*groups[1:], None), strict=True):
        name = f"{low}" if high == low + 1 else f"{low}+" if high is None else f"{low}-{high - 1}"
        for label, count, value in (("abs_d", own, d), ("prefix_drift", before, drift)):
            inside = (count >= low) & (count < (float("inf") if high is None else high))
            if bool(inside.any()):
                found[f"routing/{label}/flips_{name}"] = float(value[inside].abs().mean())
    return found
