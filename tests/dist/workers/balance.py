"""Run on forked ranks: leaders exchange trajectories, or a skewed batch is trained on with and without balance.

usage: balance.py exchange OUT.json '{"name": {"lengths": [tokens of each leader's trajectories], "replica": 1|2, "ring": true}}'
       balance.py train OUT.json MODEL '{"name": {"parallel": {...}, "balance": true}}'
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.actor.balance import Move, balance, exchange, model_cost
from megatron_rl.actor.parallel import Mesh, create_mesh, destroy_mesh, prepare_process
from megatron_rl.data.packing import Cost, positions_of
from megatron_rl.types import Batch, Candidates, Prompt, Trajectory

COST = Cost(1.0, 0.01)


def trajectory(n: int, seed: int, *, layers: int, experts: int, k: int, vocab: int, loss: bool = True) -> Trajectory:
    """Two turns, random routes; the first token is the prompt."""
    rng = np.random.default_rng(seed)
    mask = np.full(n, loss)
    mask[0] = False
    return Trajectory(
        prompt=Prompt(str(seed), np.zeros(1, np.int32), "", ""),
        group=str(seed // 2),
        tokens=rng.integers(0, vocab, n).astype(np.int32),
        loss_mask=mask,
        behaviour_logp=np.where(mask, -6.0 + rng.normal(0, 0.3, n), np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.where(mask, np.arange(n) > n // 2, -1).astype(np.int32),
        routes=np.argsort(rng.random((n - 1, layers, experts)), axis=-1)[..., :k].astype(np.uint8),
        finish_reason="stop",
        text=f"answer {seed}",
        reward=float(seed),
    )


# -- exchange ----------------------------------------------------------------------------------------------------------------------


def bare_mesh(replica: int) -> Mesh:
    """Every `replica` consecutive ranks train on the same samples; no Megatron beneath."""
    rank, world = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo")
    first = rank // replica * replica
    return Mesh(
        rank=rank, world_size=world, tensor_rank=rank - first, tensor_size=replica, pipeline_rank=0, pipeline_size=1, context_rank=0,
        context_size=1, data_rank=rank // replica, data_size=world // replica, device=torch.device("cpu"), backend="gloo",
        control_group=control, replica_group=control, replica_ranks=tuple(range(first, first + replica)), context_group=control,
    )  # fmt: skip


def marked(lengths: list[int], owner: int) -> Batch:
    """Trajectories whose every array says which they are: 100 x owner + index."""
    names = [100 * owner + i for i in range(len(lengths))]
    trajectories = []
    for n, name in zip(lengths, names, strict=True):
        one = trajectory(n, name, layers=4, experts=8, k=2, vocab=64)
        candidates = Candidates(np.full((n, 2), name, np.int32), np.full((n, 2), -float(name + 1), np.float32))
        trajectories.append(dataclasses.replace(one, candidates=candidates, keep_ids=np.full((n, 3), name, np.int32)))

    def arrays(shift: float) -> tuple[np.ndarray, ...]:
        return tuple(np.full(n, name + shift, np.float32) for n, name in zip(lengths, names, strict=True))

    return Batch(tuple(trajectories), arrays(0.0), arrays(0.25), arrays(0.5))


class Traffic:
    """Counts what this rank sends and gets through torch.distributed while it is open."""

    def __enter__(self) -> Counter[str]:
        self.bytes: Counter[str] = Counter(sent=0, got=0, gathered=0)
        self.real = {name: getattr(dist, name) for name in ("isend", "irecv", "all_gather_object")}

        def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes["sent"] += tensor.nbytes
            return self.real["isend"](tensor, *args, **kwargs)

        def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes["got"] += tensor.nbytes
            return self.real["irecv"](tensor, *args, **kwargs)

        def all_gather_object(out: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
            self.bytes["gathered"] += len(pickle.dumps(value))
            self.real["all_gather_object"](out, value, *args, **kwargs)

        dist.isend, dist.irecv, dist.all_gather_object = isend, irecv, all_gather_object
        return self.bytes

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)


def names_of(batch: Batch) -> list[int]:
    """The names of the trajectories, once everything that travels with each has been found to be its own."""
    names = []
    for i, t in enumerate(batch.trajectories):
        name = int(t.prompt.id)
        original = marked([len(t.tokens)] * (name % 100 + 1), name // 100).select([name % 100])
        mine = batch.select([i])
        assert _same(mine, original), f"trajectory {name} is not itself"
        names.append(name)
    return names


def _same(one: Batch, other: Batch) -> bool:
    a, b = one.trajectories[0], other.trajectories[0]
    assert a.candidates is not None and b.candidates is not None
    arrays = [(getattr(a, f), getattr(b, f)) for f in ("tokens", "loss_mask", "behaviour_logp", "versions", "turns", "routes", "keep_ids")]
    arrays += [(a.candidates.ids, b.candidates.ids), (a.candidates.logp, b.candidates.logp)]
    arrays += [(x[0], y[0]) for x, y in ((one.advantages, other.advantages), (one.values, other.values), (one.returns, other.returns))]
    equal = all(x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in arrays)
    return equal and (a.group, a.text, a.reward, a.finish_reason) == (b.group, b.text, b.reward, b.finish_reason)


def exchanged(options: dict[str, Any]) -> list[Any]:
    """What each rank has in the end, its load before and after, and its traffic."""
    mesh = bare_mesh(options.get("replica", 1))
    batch = None
    if mesh.is_leader:
        batch = marked(options["lengths"][mesh.data_rank], mesh.data_rank)
    before = batch
    with Traffic() as traffic:
        if options.get("ring"):
            assert batch is not None
            after: Batch | None = exchange(mesh, batch, [Move(r, (r + 1) % mesh.world_size, 0) for r in range(mesh.world_size)])
        else:
            after = balance(mesh, batch, COST)
    mine: dict[str, Any] = {"traffic": dict(traffic)}
    if before is not None and after is not None:
        mine |= {"names": names_of(after), "before": load(before), "after": load(after)}
    return mesh.gather(mine)


def load(batch: Batch, cost: Cost = COST) -> float:
    return sum(cost(positions_of(t)) for t in batch.trajectories)


# -- training ------------------------------------------------------------------------------------------------------------------------

LONG, SHORT = [61, 50, 40, 30, 12, 8, 2], [2, 9]
"""Tokens of the first and of the second leader's trajectories. Those of the second have no loss; the first's last is one loss token."""


def train(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two optimizer steps on the skewed batch, which one process has all of."""
    from megatron_rl.actor import feed, metrics
    from megatron_rl.actor.actor import Actor, with_old
    from megatron_rl.config import Config, MethodConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
    from megatron_rl.convert.families import family_for
    from megatron_rl.methods.registry import build

    parallel = ParallelConfig(**options.get("parallel", {}))
    config = Config(
        model=ModelConfig(path=model, dtype="float32", logprob_chunk=16),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-3),
        objective=ObjectiveConfig(name="gspo"),
        corrections=(MethodConfig("tis"),),
    )
    hf = json.loads((Path(model) / "config.json").read_text())
    mesh = create_mesh(parallel)
    actor = Actor(config, mesh, family_for(hf), hf)
    actor.load_hf(model)
    sizes = {"layers": actor.moe_layers, "experts": actor.experts, "k": hf["num_experts_per_tok"], "vocab": hf["vocab_size"]}
    long = [trajectory(n, i, **sizes) for i, n in enumerate(LONG)]
    short = [trajectory(n, 100 + i, loss=False, **sizes) for i, n in enumerate(SHORT)]
    mine = ([*long, *short] if mesh.data_size == 1 else [long, short][mesh.data_rank]) if mesh.is_leader else None
    batch = None
    if mine is not None:
        batch = Batch(tuple(mine), tuple(np.where(t.loss_mask, np.sin(t.reward or 0.0), 0.0).astype(np.float32) for t in mine))
    cost = model_cost(actor.core, actor.vocab_size)
    if options.get("balance"):
        batch = balance(mesh, batch, cost)
    given = feed.hand_out(mesh, actor.places, batch, budget=64, experts=actor.experts, max_tokens=64, cost=cost)
    fillers = sum(int((b.sample_S < 0).sum()) for b in given.micro_batches)
    trained = with_old(given.micro_batches, actor.score(given.micro_batches, "replay"))
    stack = build(config.objective, config.corrections)
    steps = [actor.update(trained, stack, given.over, lr=1e-3, routing="replay", entropy=True) for _ in range(2)]
    return {
        "steps": [metrics.reduce(mesh, s.metrics) | {"grad_norm": s.grad_norm} for s in steps],
        "loads": [x for x in mesh.gather(None if batch is None else load(batch, cost)) if x is not None],
        "loss_tokens": mesh.gather(sum(int(b.mask_T.sum()) for b in given.micro_batches)),
        "fillers": mesh.gather(fillers),
        "sequences": [b.num_sequences for b in given.micro_batches],
    }


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    faulthandler.dump_traceback_later(150, exit=True)  # a hang shows where
    prepare_process(threads=1)
    if kind == "exchange":
        dist.init_process_group("gloo")
        results: dict[str, Any] = {name: exchanged(options) for name, options in json.loads(sys.argv[3]).items()}
    else:
        results = {name: train(sys.argv[3], options) for name, options in json.loads(sys.argv[4]).items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    if kind == "exchange":
        dist.destroy_process_group()
    else:
        destroy_mesh()


if __name__ == "__main__":
    main()
