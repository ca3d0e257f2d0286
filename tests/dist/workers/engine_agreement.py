"""Run on forked ranks: samples from a running server and scores the same tokens with the actor, routing live and replayed.

usage: engine_agreement.py MODEL URL ENGINE_DTYPE OUT.json '{"tensor": 2, ...}'
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from megatron_rl.actor import feed, metrics
from megatron_rl.actor.actor import Actor
from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from megatron_rl.config import Config, ModelConfig, ParallelConfig, RolloutConfig
from megatron_rl.convert.families import family_for
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.routing.agreement import LayerCounts, summary
from megatron_rl.types import Batch, Prompt


def sampled(url: str, model: str, dtype: str, vocab: int) -> Batch:
    rng = np.random.default_rng(0)
    prompts = [Prompt(str(i), rng.integers(3, vocab, 12).astype(np.int32), "", "") for i in range(16)]
    rollout = RolloutConfig(dtype=dtype, urls=(url,), max_new_tokens=100)  # type: ignore[arg-type]
    with Fleet.connect([url], rollout, ModelConfig(path=model), routes=True) as fleet:
        answers = collect(fleet, prompts, samples=1, sampling=Sampling(max_new_tokens=100), routes=True, version=None)
    return Batch(tuple(answers), tuple(np.zeros(len(a.tokens), np.float32) for a in answers))


def main() -> None:
    model, url, dtype, out, layout = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5])
    prepare_process(threads=1)
    from megatron.core.transformer.moe.router import TopKRouter

    parallel = ParallelConfig(**layout)
    config = Config(model=ModelConfig(path=model, dtype="float32"), parallel=parallel)
    hf = json.loads((Path(model) / "config.json").read_text())
    mesh = create_mesh(parallel)
    actor = Actor(config, mesh, family_for(hf), hf, trains=False)
    actor.load_hf(model)
    batch = sampled(url, model, dtype, hf["vocab_size"]) if mesh.is_leader else None
    given = feed.hand_out(mesh, actor.places, batch, budget=4096, experts=actor.experts, max_tokens=100).micro_batches
    maps: dict[int, torch.Tensor] = {}
    for chunk in actor.chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(lambda m, _, output: maps.__setitem__(m.layer_number, output[1].detach()))
    found = metrics.Metrics()
    flips = torch.zeros(2, dtype=torch.int64)
    first_of: list[int] = []
    layers: dict[int, LayerCounts] = {}
    for routing, suffix in (("observe", "live"), ("replay", "replay")):
        scored = actor.score(given, routing)  # type: ignore[arg-type]
        for b, stats in zip(given, scored.stats, strict=True):
            means, maxima = metrics.mismatch(stats.logp_T, b.behaviour_logp_T, b.mask_T, suffix)
            found.add(means, maxima=maxima)
        for b, differing, first in zip(given, scored.differing, scored.first, strict=False):
            flips += torch.stack([(differing[b.real_T] > 0).sum(), b.real_T.sum()])
            first_of += first[b.real_T & (differing > 0)].tolist()
        for part in mesh.gather(scored.agreement):
            layers = layers | {n: counts + layers[n] if n in layers else counts for n, counts in part.items()}
    # the maps are those of the last pass: the replayed one, whose single micro-batch this rank's rows describe
    assert len(given) == 1
    rows = given[0].routes_TLK
    assert rows is not None
    exact = all(
        torch.equal(maps[n], torch.zeros_like(maps[n]).scatter(1, rows[:, column].long(), True))
        for column, n in enumerate(actor.replay.layer_numbers)
    )
    everywhere = mesh.gather(exact)
    values = metrics.reduce(mesh, found)
    if mesh.is_main:
        told = {"routes_exact": all(everywhere), "token_flips": int(flips[0]), "tokens": int(flips[1]), "first_layers": Counter(first_of)}
        out.write_text(json.dumps(values | summary(layers) | told))
    mesh.barrier()
    destroy_mesh()


if __name__ == "__main__":
    main()
