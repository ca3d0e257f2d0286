"""What is looked at on a few answers now and then: the gap to the engine, and how routes agree. Collective over all ranks.

Three pairs of routings, by the prefix of their metrics: `routing/` the trainer's own pass against the engine's routes, `routing/replayed/`
what routers would have chosen where the engine's routes were replayed all the way, `routing/moved/` the weights after the step's updates
against those before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .actor.actor import Scored
from .actor.collect import sequences
from .actor.feed import Feed
from .actor.metrics import Metrics, mismatch, reduce
from .experience import hand_out_batch, record_scores
from .methods import bounds
from .routing import agreement
from .run import Run
from .types import PackedBatch, RouterScores, as_metric


@dataclass(frozen=True)
class Probed:
    """What `probe_again` compares with."""

    batches: Sequence[PackedBatch]
    scores: Sequence[RouterScores]
    """This rank's own choices and their scores, one entry a micro-batch; empty on a rank without MoE layers."""


SHARE = 16
"""A probe takes one in so many of the step's answers. It scores them three times, where training takes some three and a half times of a
forward over all of them: 5 % of the training, or twice that where models are so small that a pass costs more than its tokens do."""
LEAST = 4
"""Answers that a probe takes at least, of each leader."""


def probe(run: Run, feed: Feed, step: int) -> tuple[dict[str, float], Probed | None]:
    """`look` at a sixteenth of the step's answers, every `replay.probe_every` steps.

    Args:
        feed: the first mini-batch, whose answers are in random order.
    """
    every = run.config.replay.probe_every
    if not every or step % every or not run.wants_routes:
        return {}, None
    batch = feed.batch
    if batch is not None:
        answers = len(batch.trajectories)
        batch = batch.select(range(min(answers, max(LEAST, answers * run.config.train.mini_batches // SHARE))))
    return look(run, hand_out_batch(run, batch))


def look(run: Run, feed: Feed) -> tuple[dict[str, float], Probed]:
    """The gap to the engine on the feed's first micro-batch, with the engine's routes and without: what replay removes."""
    batches = feed.micro_batches[: run.actor.micro_batch_multiple]
    live = run.actor.score(batches, "observe", router_scores=True)
    replayed = run.actor.score(batches, "replay", observe=True)
    metrics = _token_shares(run, batches, live, "routing").merge(_token_shares(run, batches, replayed, "routing/replayed"))
    metrics.merge(_mismatch(batches, live, "live")).merge(_mismatch(batches, replayed, "replay"))
    values = reduce(run.mesh, metrics)
    record_scores(run, feed, "flips", live.differing)
    values |= agreement.summary(_gathered(run, live)) | _by_flips(run, batches, live)
    values |= agreement.summary(_gathered(run, replayed), "routing/replayed", by_layer=False)
    return values | _bounds(run, batches, replayed), Probed(batches, live.router_scores)


def probe_again(run: Run, before: Probed | None) -> dict[str, float]:
    """How far the step's updates moved the routing of the probed micro-batch: choices, and scores of the experts chosen before."""
    if before is None:
        return {}
    batches = list(before.batches)
    if before.scores:
        batches = [dataclasses.replace(b, routes_TLK=s.experts_RLK) for b, s in zip(batches, before.scores, strict=True)]
    now = run.actor.score(batches, "observe", compare_with=before.scores)
    values = reduce(run.mesh, _token_shares(run, batches, now, "routing/moved").merge(_gamma(batches, now)))
    return values | agreement.summary(_gathered(run, now), "routing/moved", by_layer=False)


def _gamma(batches: Sequence[PackedBatch], now: Scored) -> Metrics:
    """RSPO's trust in a token, e^-(mean |log score now / before|), without its floor; padding left out."""
    metrics = Metrics()
    for batch, shift_T in zip(batches, now.shift, strict=True):
        trust_M = torch.exp(-shift_T[batch.real_T].double())
        metrics.add({"routing/moved/gamma": as_metric(trust_M.sum(), float(trust_M.numel()))})
        if trust_M.numel():
            metrics.add(maxima={"routing/moved/shift_max": shift_T[batch.real_T].max()})
    return metrics


def _gathered(run: Run, scored: Scored) -> dict[int, agreement.LayerCounts]:
    """Every layer's counts over all ranks."""
    layers: dict[int, agreement.LayerCounts] = {}
    for part in run.mesh.gather(scored.agreement):
        for depth, counts in part.items():
            layers[depth] = counts + layers[depth] if depth in layers else counts
    return layers


def _by_flips(run: Run, batches: Sequence[PackedBatch], live: Scored) -> dict[str, float]:
    """What a flipped route does to the log-ratio."""
    flips = sequences(run.mesh, batches, [x.float() for x in live.differing])
    return agreement.by_flips([torch.from_numpy(x) for x in flips], [torch.from_numpy(x) for x in _drifts(run, batches, live)])


def _bounds(run: Run, batches: Sequence[PackedBatch], scored: Scored) -> dict[str, float]:
    """TRM's bounds on the error of the surrogate, engine against trainer on replayed routes, estimated from the sampled tokens."""
    log_ratios = _drifts(run, batches, scored)
    return {f"bounds/{name}": value for name, value in bounds.all_bounds(bounds.sampled(log_ratios)).items()} if log_ratios else {}


def _drifts(run: Run, batches: Sequence[PackedBatch], scored: Scored) -> list[NDArray[np.float32]]:
    """[n] log trainer - log engine of the loss tokens of each sequence, over all ranks."""
    return sequences(run.mesh, batches, [s.logp_T.cpu() - b.behaviour_logp_T for b, s in zip(batches, scored.stats, strict=False)])


def _mismatch(batches: Sequence[PackedBatch], scored: Scored, suffix: str) -> Metrics:
    metrics = Metrics()
    for batch, stats in zip(batches, scored.stats, strict=False):
        device = stats.logp_T.device
        means, maxima = mismatch(stats.logp_T, batch.behaviour_logp_T.to(device), batch.mask_T.to(device), suffix)
        metrics.add(means, maxima=maxima)
    return metrics


def _token_shares(run: Run, batches: Sequence[PackedBatch], scored: Scored, prefix: str) -> Metrics:
    """How many tokens (and token-layers) are routed otherwise than given, and where first; padding left out."""
    metrics = Metrics()
    for batch, differing_T, first_T in zip(batches, scored.differing, scored.first, strict=True):
        real_T = batch.real_T
        differs_T = real_T & (differing_T > 0)
        metrics.add(
            {
                f"{prefix}/token_mismatch_share": as_metric(differs_T.sum(), real_T.sum()),
                f"{prefix}/layer_mismatch_share": as_metric(torch.where(real_T, differing_T, 0).sum(), real_T.sum() * run.actor.moe_layers),
                f"{prefix}/first_divergent_layer": as_metric(torch.where(differs_T, first_T, 0).sum(), differs_T.sum()),
            }
        )
    return metrics
