#!/usr/bin/env python
"""What replay removes of the gap between a bf16 server and an fp32 trainer, by depth of the model, and what routes say without it.

    python tools/bench/replay_gap.py                 # random mixtures of experts of 4 and 16 layers, a table each
    python tools/bench/replay_gap.py --layers 8 --json

Each model (hidden 128, 8 experts, top-2, weights of standard deviation 0.1, so that routing is often undecided) is served by SGLang in
bf16, which samples 16 answers of 100 tokens with its routes; an fp32 actor in this process scores the same tokens, routing live and
replaying. d is log trainer - log engine of a sampled token, k3 the mean of e^d - 1 - d; a margin is the log-score of the last chosen
expert less that of the first left out, in the trainer's live pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only tools/bench is on the path

from megatron_rl.actor import feed
from megatron_rl.actor.actor import Actor
from megatron_rl.actor.metrics import mismatch
from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from megatron_rl.config import Config, ModelConfig, ParallelConfig, RolloutConfig
from megatron_rl.convert.families import family_for
from megatron_rl.convert.hf import read_config
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.types import Batch, PackedBatch, Prompt
from tools.make_tiny_moe import TinyModel, make_tiny_moe

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 12, 100
QUANTILES = (0.1, 0.5, 0.9)


def sampled(model: Path, vocab: int, seed: int) -> Batch:
    """What a bf16 server answers to random prompts."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(str(i), rng.integers(3, vocab, PROMPT_TOKENS).astype(np.int32), "", "") for i in range(PROMPTS)]
    with Fleet.start(
        RolloutConfig(dtype="bfloat16"), ModelConfig(path=str(model)), routes=True, log_dir=model / "server", context_length=256
    ) as fleet:
        answers = collect(fleet, prompts, samples=1, sampling=Sampling(max_new_tokens=NEW_TOKENS), routes=True, version=None)
    return Batch.without_advantages(answers)


def open_actor(model: Path) -> tuple[Actor, Any]:
    """The trainer in fp32, alone."""
    parallel = ParallelConfig()
    mesh = create_mesh(parallel)
    hf = read_config(model)
    actor = Actor(Config(model=ModelConfig(path=str(model), dtype="float32"), parallel=parallel), mesh, family_for(hf), hf, trains=False)
    actor.load_hf(model)
    return actor, mesh


def gap(batch: PackedBatch, logp_T: Tensor) -> dict[str, float]:
    """Mean and largest |d|, and k3."""
    means, maxima = mismatch(logp_T, batch.behaviour_logp_T, batch.mask_T, "")
    named = {name: float(total / count) for name, (total, count) in means.items()} | {name: float(x) for name, x in maxima.items()}
    return {name.removeprefix("mismatch/").rstrip("_"): value for name, value in named.items()}


def flips(batch: PackedBatch, live_TLK: Tensor) -> Tensor:
    """bool [T, L] whether the trainer's set of experts is another than the engine's; padding left out."""
    assert batch.routes_TLK is not None
    given = batch.routes_TLK[batch.real_T].long().sort(dim=-1).values
    return (given != live_TLK[batch.real_T].sort(dim=-1).values).any(dim=-1)


def measure(model: Path, layers: int, seed: int) -> dict[str, Any]:
    """One depth."""
    batch = sampled(make_tiny_moe(model, TinyModel(layers=layers, init=0.1, seed=seed)), TinyModel().vocab, seed)
    actor, mesh = open_actor(model)
    (packed,) = feed.hand_out(mesh, actor.places, batch, budget=4096, experts=actor.experts, max_tokens=NEW_TOKENS).micro_batches
    live = actor.score([packed], "record", router_margins=True)
    replayed = actor.score([packed], "replay", observe=True)
    used = actor.score([dataclasses.replace(packed, routes_TLK=live.routes[0].to(torch.uint8))], "replay")
    destroy_mesh()
    differs_ML, margin_ML = flips(packed, live.routes[0]), live.margins[0][packed.real_T]
    flipped_M = differs_ML.any(dim=1)
    first = torch.bincount(differs_ML[flipped_M].int().argmax(dim=1), minlength=layers).tolist()
    local = replayed.differing[0][packed.real_T]
    return {
        "layers": layers,
        "tokens": int(packed.real_T.sum()),
        "live": gap(packed, live.stats[0].logp_T),
        "replay": gap(packed, replayed.stats[0].logp_T),
        "own_routes_are_the_identity": bool(torch.equal(used.stats[0].logp_T, live.stats[0].logp_T)),
        "token_layers_flipped": float(differs_ML.float().mean()),
        "tokens_flipped": float(flipped_M.float().mean()),
        "tokens_flipped_behind_replayed_layers": float((local > 0).float().mean()),
        "first_mismatching_layer": first,
        "margin_at_flips": quantiles(margin_ML[differs_ML]),
        "margin_elsewhere": quantiles(margin_ML[~differs_ML]),
    }


def quantiles(values: Tensor) -> dict[str, float]:
    """By name, such as q50; nothing of nothing."""
    if not values.numel():
        return {}
    return {f"q{round(100 * q)}": float(torch.quantile(values.double(), q)) for q in QUANTILES}


def show(row: dict[str, Any]) -> None:
    """For people."""
    print(f"{row['layers']} layers, {row['tokens']} tokens")
    print(f"  {'routing':<8} {'mean |d|':>9} {'max |d|':>9} {'k3':>9}")
    for name in ("live", "replay"):
        print(f"  {name:<8} {row[name]['mean_abs']:>9.1e} {row[name]['max_abs']:>9.2e} {row[name]['k3']:>9.1e}")
    print(f"  replay of the trainer's own routes changes no bit: {row['own_routes_are_the_identity']}")
    print(f"  routed otherwise: {row['token_layers_flipped']:.2%} of token-layers, {row['tokens_flipped']:.1%} of tokens")
    print(f"  of tokens whose layers before are replayed: {row['tokens_flipped_behind_replayed_layers']:.1%}")
    print(f"  first mismatching layer (tokens, by depth from 0): {row['first_mismatching_layer']}")
    for name in ("margin_at_flips", "margin_elsewhere"):
        print(f"  {name.replace('_', ' ')}: {', '.join(f'{q} {value:.4f}' for q, value in row[name].items())}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    prepare_process(threads=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for layers in options.layers:
            rows.append(measure(Path(temporary) / str(layers), layers, options.seed))
            if not options.json:
                show(rows[-1])
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
