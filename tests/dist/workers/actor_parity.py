"""Run by torchrun: two optimizer steps on one fixed ragged batch under each layout asked for; writes metrics, log-probs, weights.

usage: actor_parity.py MODEL OUT.json '{"name": {"parallel": {...}, "recompute": ..., "routing": ..., "budget": ..., "objective": ...}}'
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process


def make_batch(vocab: int, layers: int, experts: int, k: int, seed: int = 0) -> Any:
    """Seven ragged trajectories with two turns each, random routes and NaN outside the loss mask."""
    from megatron_rl.types import Batch, Prompt, Trajectory

    rng = np.random.default_rng(seed)
    trajectories, advantages = [], []
    for i, n in enumerate([5, 9, 17, 12, 30, 3, 8]):
        mask = np.zeros(n, dtype=bool)
        mask[n // 3 : n // 2] = True
        mask[n // 2 + 1 :] = True
        mask[0] = False
        turns = np.where(mask, (np.arange(n) > n // 2).astype(np.int32), -1).astype(np.int32)
        logp = np.where(mask, -6.0 + rng.normal(0, 0.3, n), np.nan).astype(np.float32)
        routes = np.argsort(rng.random((n - 1, layers, experts)), axis=-1)[..., :k].astype(np.uint8)
        prompt = Prompt(id=str(i), tokens=np.zeros(1, np.int32), text="", answer="")
        trajectories.append(
            Trajectory(prompt, str(i // 2), rng.integers(0, vocab, n).astype(np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32),
                       turns, routes, "stop", "", 0.0)
        )  # fmt: skip
        advantages.append(np.where(mask, rng.normal(), 0.0).astype(np.float32))
    return Batch(tuple(trajectories), tuple(advantages))


def run(model: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Scores, then two optimizer steps; the result on rank 0."""
    from megatron_rl.actor import feed, metrics
    from megatron_rl.actor.actor import Actor, with_old
    from megatron_rl.config import Config, MethodConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
    from megatron_rl.convert.families import family_for
    from megatron_rl.methods.registry import build
    from megatron_rl.types import Batch

    parallel = ParallelConfig(**options.get("parallel", {}))
    config = Config(
        model=ModelConfig(path=model, dtype="float32", recompute=options.get("recompute", "none"), logprob_chunk=16),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-3),
        objective=ObjectiveConfig(name=options.get("objective", "grpo")),
        corrections=(MethodConfig("tis"),),
    )
    hf = json.loads((Path(model) / "config.json").read_text())
    mesh = create_mesh(parallel)
    actor = Actor(config, mesh, family_for(hf), hf)
    actor.load_hf(model)
    routing = options.get("routing", "replay")
    whole = make_batch(hf["vocab_size"], actor.moe_layers or 1, actor.experts, hf["num_experts_per_tok"])
    mine = None
    if mesh.is_leader:
        chosen = range(mesh.data_rank, len(whole.trajectories), mesh.data_size)
        mine = Batch(tuple(whole.trajectories[i] for i in chosen), tuple(whole.advantages[i] for i in chosen))
    batch = feed.hand_out(
        mesh,
        actor.places,
        mine,
        budget=options.get("budget", 64),
        experts=actor.experts,
        max_tokens=32,
        multiple=actor.micro_batch_multiple,
    )
    stack = build(config.objective, config.corrections)
    scored = actor.score(batch.micro_batches, routing)
    trained = with_old(batch.micro_batches, scored)
    steps = [actor.update(trained, stack, batch.over, lr=1e-3, routing=routing, entropy=True) for _ in range(2)]
    reduced = [metrics.reduce(mesh, s.metrics) | {"grad_norm": s.grad_norm} for s in steps]
    logps = {}
    for b, s in zip(batch.micro_batches, scored.stats, strict=False):
        for i, sample in enumerate(b.sample_S.tolist()):
            if sample >= 0:
                logps[str(sample * mesh.data_size + mesh.data_rank)] = s.logp_T[b.mask_T & (b.sequence_T == i)].tolist()
    gathered = mesh.gather(logps if mesh.reports else {})
    weights = {n: float(w.double().square().sum()) for n, w in actor.weights() if w is not None}
    joined = {k: v for part in gathered for k, v in part.items()}
    main_rank = mesh.is_main
    mesh.barrier()
    return {"steps": reduced, "logp": joined, "weights": weights, "micro_batches": len(batch.micro_batches)} if main_rank else None


def main() -> None:
    model, out, runs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    faulthandler.dump_traceback_later(120, exit=True)  # a hang shows where
    prepare_process(threads=1)
    results = {name: run(model, options) for name, options in runs.items()}
    if all(r is not None for r in results.values()):
        out.write_text(json.dumps(results))
    destroy_mesh()


if __name__ == "__main__":
    main()
