"""Measurements made up for tests: plausible, small, and with known causes."""

from __future__ import annotations

import numpy as np

from megatron_rl.lab.records import Condition, EngineSetting, Measurement, Rescored, Sampled, TokenBatch

LAYERS, TOP_K, EXPERTS = 4, 2, 8
PROMPT = 6


def made_up_measurement(seed: int = 0, trajectories: int = 24, longest: int = 40) -> Measurement:
    """Two engine settings, of which the second is noisier; the main one under live and replayed routing, two dtypes, lags 0 and 2.

    The log-ratio is numerics + routing + staleness, each drawn with the (1 - p) law; flips are likelier where margins are small.
    """
    rng = np.random.default_rng(seed)
    samples = {
        "bf16": _sampled(rng, EngineSetting("bf16", "bf16"), 0.02, trajectories, longest),
        "bf16 int8": _sampled(rng, EngineSetting("bf16 int8", "bf16", quantisation="int8"), 0.06, trajectories, longest),
    }
    floor = {
        f"{name}/{what}": {"mean_k3": k3, "mean_abs_d": 4 * k3, "max_abs_d": 60 * k3, "std_d": k3**0.5, "tokens": 500.0}
        for name in samples
        for what, k3 in (("trainer repeated", 0.0), ("trainer, other packing", 1e-9), ("engine, other batch", 2e-5))
    }
    meta = {"model": "made up", "seed": seed, "moe_layers": LAYERS, "experts": EXPERTS, "advantages": "rewards"}
    return Measurement(samples, floor, meta)


def _batch(rng: np.random.Generator, trajectories: int, longest: int) -> TokenBatch:
    lengths = rng.integers(4, longest, trajectories)
    sizes = lengths + PROMPT - 1
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mask = np.concatenate([np.arange(n) >= PROMPT - 1 for n in sizes])
    total = int(offsets[-1])
    mu = np.where(mask, np.log(rng.beta(2.0, 1.0, total).clip(1e-4, 1 - 1e-6)), 0.0)
    group = np.arange(trajectories, dtype=np.int32) // 4
    reward = (rng.random(trajectories) < 0.5).astype(np.float32)
    mean = np.array([reward[group == g].mean() for g in group])
    return TokenBatch(
        label_T=rng.integers(3, 259, total).astype(np.int32),
        mask_T=mask,
        offsets_S=offsets.astype(np.int64),
        first_S=rng.integers(3, 259, trajectories).astype(np.int32),
        turn_T=np.where(mask, 0, -1).astype(np.int32),
        mu_T=mu.astype(np.float32),
        version_T=np.where(mask, 0, -1).astype(np.int32),
        reward_S=reward,
        advantage_S=(reward - mean).astype(np.float32),
        group_S=group,
        routes_TLK=_routes(rng, total),
    )


def _routes(rng: np.random.Generator, total: int) -> np.ndarray:
    scores = rng.random((total, LAYERS, EXPERTS))
    return np.argsort(scores, axis=-1)[..., :TOP_K].astype(np.uint8)


def _sampled(rng: np.random.Generator, engine: EngineSetting, size: float, trajectories: int, longest: int) -> Sampled:
    batch = _batch(rng, trajectories, longest)
    mask, total = batch.mask_T, len(batch.label_T)
    assert batch.routes_TLK is not None
    spread = 1 - np.exp(batch.mu_T)

    def noise(scale: float) -> np.ndarray:
        return np.where(mask, scale * spread * rng.standard_normal(total), 0.0)

    margin = rng.exponential(0.5, (total, LAYERS)).astype(np.float32)
    flipped = margin < 0.03
    live_routes = batch.routes_TLK.copy()
    live_routes[flipped, 0] = (live_routes[flipped].max(axis=-1) + 1) % EXPERTS
    numerics, dtype = noise(size), noise(0.5 * size)
    by_layer = np.where(flipped, noise(2 * size)[:, None], 0.0)
    stale = noise(size) - 0.002 * mask

    def scored(name: str, logp: np.ndarray, **fields: object) -> Rescored:
        condition = Condition(name, **{"replay": "none", "dtype": "fp32", "layout": "one process", **fields})  # type: ignore[arg-type]
        routes = live_routes if condition.replay == "none" else batch.routes_TLK
        value = np.where(mask, np.minimum(logp, -1e-9), 0.0).astype(np.float32)
        entropy = np.where(mask, spread, 0).astype(np.float32)
        wide = (np.abs(value - batch.mu_T) / np.maximum(spread, 1e-6)).astype(np.float32)  # 2 eps (1 - p) holds with room to spare
        return Rescored(condition, value, entropy, routes, margin if condition.replay == "none" else None, np.where(mask, wide, 0))

    replayed = batch.mu_T + numerics
    live = replayed + by_layer.sum(axis=1)
    found = [
        scored("live", live),
        scored("R3", replayed, replay="R3"),
        scored("live, bf16", live + dtype, dtype="bf16"),
        scored("R3, bf16", replayed + dtype, replay="R3", dtype="bf16"),
        scored("live, lag 2", live + stale, lag=2),
        scored("R2, lag 2", live + stale, replay="R2", lag=2),
        scored("R3, lag 2", replayed + stale, replay="R3", lag=2),
    ]
    for layer in range(LAYERS):
        only, upto = (layer,), tuple(range(layer + 1))
        found.append(scored(f"R3 at layer {layer}", live - by_layer[:, layer], replay="R3", replayed_layers=only))
        found.append(scored(f"R3 up to layer {layer}", live - by_layer[:, : layer + 1].sum(axis=1), replay="R3", replayed_layers=upto))
    return Sampled(engine, batch, {one.condition.name: one for one in found})
