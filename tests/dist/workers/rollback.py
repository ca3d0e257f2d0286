"""Run on forked ranks: a step that was taken back leaves nothing behind. Prints one line a case; an assertion fails the worker.

usage: rollback.py MODEL '{"name": {"parallel": {...}, "dtype": ..., "before": 0 or 1}}'
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from tools.layouts.batch import make_batch


class Case:
    """A policy in one layout and dtype, with a batch for each seed."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from megatron_rl.actor.actor import Actor
        from megatron_rl.config import Config, MethodConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
        from megatron_rl.convert.families import family_for
        from megatron_rl.methods.registry import build

        parallel = ParallelConfig(**options.get("parallel", {}))
        objective, corrections = ObjectiveConfig(name="ppo"), (MethodConfig("tis"),)
        config = Config(
            model=ModelConfig(path=model, dtype=options.get("dtype", "float32")),
            parallel=parallel,
            optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1),
        )
        self.hf = json.loads((Path(model) / "config.json").read_text())
        self.mesh = create_mesh(parallel, 7)
        self.actor = Actor(config, self.mesh, family_for(self.hf), self.hf)
        self.actor.load_hf(model)
        self.stack = build(objective, corrections)

    def update(self, seed: int) -> dict[str, float]:
        """One optimizer step on the batch of that seed; its metrics, over all ranks."""
        from megatron_rl.actor import feed, metrics

        whole = make_batch(self.hf["vocab_size"], self.actor.moe_layers, self.actor.experts, self.hf["num_experts_per_tok"], seed)
        mine = whole.select(range(self.mesh.data_rank, len(whole.trajectories), self.mesh.data_size)) if self.mesh.is_leader else None
        batch = feed.hand_out(self.mesh, self.actor.places, mine, budget=64, experts=self.actor.experts, max_tokens=32)
        # Each step at a rate of its own, as a schedule gives it: the parameter groups hold the last one.
        done = self.actor.update(batch.micro_batches, self.stack, batch.over, lr=1e-3 / (1 + seed), routing="replay")
        return metrics.reduce(self.mesh, done.metrics) | {"grad_norm": done.grad_norm}

    def state(self) -> dict[str, str]:
        """Hashes of this rank's parameters, of the optimizer's masters and moments, and of its settings."""
        from megatron_rl.actor.optimizer import parts

        inner = [part.optimizer for part in parts(self.actor.optimizer)]
        groups = [group for optimizer in inner for group in optimizer.param_groups]
        moments = [
            value if isinstance(value, torch.Tensor) else torch.tensor(value)
            for optimizer in inner
            for group in optimizer.param_groups
            for parameter in group["params"]
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
        ]
        return {
            "weights": digest(p for chunk in self.actor.chunks for p in chunk.parameters()),
            "masters": digest(p for group in groups for p in group["params"]),
            "moments": digest(moments),
            "settings": repr([{k: v for k, v in group.items() if k != "params"} for group in groups]),
        }


def digest(tensors: Any) -> str:
    """Of the bytes, with shapes and dtypes."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(repr((x.dtype, tuple(x.shape))).encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def drawn() -> list[float]:
    """The next number of each host generator."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002


def run(model: str, options: dict[str, Any]) -> None:
    """A: (step 1,) a step taken back, step 3. B: (step 1,) step 3."""
    from megatron_rl.actor import snapshot

    before = options.get("before", 1)
    a = Case(model, options)
    for seed in range(before):
        a.update(seed)
    start = a.state()
    taken = snapshot.take(a.actor)
    numbers = drawn()
    a.update(5)
    drawn()
    changed = a.state()
    assert all(start[name] != changed[name] for name in start), "the rejected step did not move everything that is compared"
    snapshot.restore(a.actor, taken)
    assert a.state() == start, {name for name in start if a.state()[name] != start[name]}
    assert drawn() == numbers, "the generators go on from where they stood"
    metrics, after = a.update(9), a.state()
    again = snapshot.take(a.actor)  # a snapshot serves twice: the second of two rejected steps
    a.update(5)
    snapshot.restore(a.actor, again)
    assert a.state() == after

    b = Case(model, options)
    for seed in range(before):
        b.update(seed)
    assert b.update(9) == metrics
    assert b.state() == after, {name for name in after if b.state()[name] != after[name]}
    if options.get("dtype") == "bfloat16":
        assert after["weights"] != after["masters"], "masters of their own"


def main() -> None:
    model, runs = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(200, exit=True)  # a hang shows where
    prepare_process(threads=1)
    for name, options in runs.items():
        try:
            run(model, options)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        if torch.distributed.get_rank() == 0:
            print(f"passed: {name}", flush=True)
    destroy_mesh()


if __name__ == "__main__":
    main()
