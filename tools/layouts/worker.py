"""Run by torchrun: scores two mini-batches and takes one optimizer step on each, through the functions of the training loop.

usage: worker.py FOLDER '[["Case", {"method": ..., "layout": ..., ...}], ["ReplayCase", {...}], ...]' OUT.json

FOLDER is filled by `runs.make_models`. Cases of replay are watched (`watch.watched`) instead.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.actor.actor import Actor, Restriction
from megatron_rl.actor.checkpoint import TrainState
from megatron_rl.actor.collect import to_leader
from megatron_rl.actor.feed import Feed
from megatron_rl.actor.parallel import Mesh, create_mesh, destroy_mesh, launch_context, prepare_process
from megatron_rl.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    ModelFacts,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceConfig,
    ReplayConfig,
    RolloutConfig,
    TrainConfig,
    read_model_facts,
)
from megatron_rl.convert.families import family_for
from megatron_rl.convert.hf import read_config
from megatron_rl.experience import hand_out_batch
from megatron_rl.methods.requirements import configured
from megatron_rl.probe import look, probe_again
from megatron_rl.run import SCORING, Run, open_reference
from megatron_rl.stages import optimize, score_old, score_reference
from megatron_rl.telemetry.progress import Progress
from megatron_rl.telemetry.timers import Timers
from megatron_rl.types import Batch
from tools.layouts.batch import LENGTHS, make_batch
from tools.layouts.matrix import SECONDS_A_CASE, Case
from tools.layouts.replays import ReplayCase
from tools.layouts.watch import open_actor, watched

SCORED = ("grpo", "dvp", "keep_sets")
"""Whose log-probs at the start of the step are looked at, too: they depend on a method only through its vocabulary."""
PROBED = ("grpo",)
"""Where the agreement of routes is looked at, too: it depends on no method."""
ONE_MICRO_BATCH = 96
"""Positions that all of a mini-batch fits into."""
SEEDS = (0, 1)
"""Of the two mini-batches."""


def configuration(folder: Path, case: Case) -> Config:
    """A whole training configuration."""
    setup = case.setup

    def listed(named: dict[str, dict[str, Any]]) -> tuple[MethodConfig, ...]:
        return tuple(MethodConfig(name, params) for name, params in named.items())

    return Config(
        model=ModelConfig(path=str(folder / "model"), dtype="float32", recompute=case.recompute, logprob_chunk=16),
        parallel=ParallelConfig(**case.where.parallel),
        # Adam divides a gradient by its own size. With eps far above what rounding leaves of a gradient of 0, that stays noise.
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-5),
        rollout=RolloutConfig(max_new_tokens=16, **setup.rollout),
        objective=ObjectiveConfig(setup.objective, setup.params, entropy=True),
        corrections=listed(setup.corrections),
        methods=listed(setup.methods),
        reference=ReferenceConfig(str(folder / "reference")),
        replay=ReplayConfig(case.replay, probe_every=0),
        data=DataConfig(max_prompt_tokens=16, step_delimiter=";"),  # the batch has turns
        train=TrainConfig(steps=1, mini_batches=len(SEEDS), tokens_per_micro_batch=case.budget),
    )


def open_case(folder: Path, case: Case, mesh: Mesh) -> Run:
    """What `run.open_run` makes, without a fleet and without files."""
    config = configuration(folder, case)
    facts = read_model_facts(config.model.path)
    stack, estimator = configured(config, facts)
    hf = read_config(config.model.path)
    actor = Actor(config, mesh, family_for(hf), hf, restriction=Restriction.of(stack))
    actor.load_hf(config.model.path)
    state = TrainState(0, 0, 0, seed=0, architecture=facts.architecture, world_size=mesh.world_size, has_optimizer=True)
    run = Run(config, facts, mesh, actor, stack, estimator, state, Timers(), Progress("none", 1), folder)
    if "reference" in stack.needs:
        run.reference = open_reference(config, mesh, facts, stack)
    return run


def whole_batch(run: Run, facts: ModelFacts, experts_a_token: int, seed: int) -> Batch:
    """The trajectories of all data-parallel ranks; the last one carries no loss, so that some rank's micro-batch may have none."""
    return make_batch(
        facts.vocab_size,
        facts.layers,
        facts.experts,
        experts_a_token,
        seed,
        lengths=(*LENGTHS, 6),
        silent=1,
        candidates=run.stack.candidates("behaviour_top_k", facts.vocab_size),
        keep=run.config.rollout.keep_sets if "keep_sets" in run.stack.needs else 0,
    )


def share(mesh: Mesh, whole: Batch) -> Batch | None:
    """A leader's trajectories: every data_size-th, so that `Actor.tokens` knows each by its index in the whole batch."""
    return whole.select(range(mesh.data_rank, len(whole.trajectories), mesh.data_size)) if mesh.is_leader else None


def old_logps(run: Run, feeds: Sequence[Feed], mine: Sequence[Batch | None]) -> dict[str, list[float]]:
    """Log-probs at the start of the step: mini-batch/trajectory -> its loss tokens in order of position."""
    found: dict[str, list[float]] = {}
    for index, (feed, batch) in enumerate(zip(feeds, mine, strict=True)):
        stats = run.actor.score(feed.micro_batches, SCORING[run.config.replay.mode]).stats
        arrays = to_leader(run.mesh, feed.micro_batches, [s.logp_T for s in stats], batch)
        for i, array in enumerate(arrays):
            found[f"{index}/{i * run.mesh.data_size + run.mesh.data_rank}"] = array[~np.isnan(array)].tolist()
    return {name: values for part in run.mesh.gather(found) for name, values in part.items()}


def one_feed(run: Run, batch: Batch | None) -> Feed:
    """All of a leader's batch in as few micro-batches as the layout takes, where `look` sees all of it."""
    train = dataclasses.replace(run.config.train, tokens_per_micro_batch=ONE_MICRO_BATCH)
    return hand_out_batch(dataclasses.replace(run, config=dataclasses.replace(run.config, train=train)), batch)


def measure(folder: Path, case: Case, mesh: Mesh) -> dict[str, Any]:
    """What the layouts are compared by, the same on every rank but for the weights, which rank 0 has."""
    run = open_case(folder, case, mesh)
    k = int(read_config(folder / "model")["num_experts_per_tok"])
    mine = [share(run.mesh, whole_batch(run, run.facts, k, seed)) for seed in SEEDS]
    feeds = [hand_out_batch(run, batch) for batch in mine]
    logps = old_logps(run, feeds, mine) if case.method in SCORED else {}
    seen: dict[str, float] = {}
    probed = None
    if case.method in PROBED:
        seen, probed = look(run, one_feed(run, mine[0]))
    statistics = seen | optimize(run, score_reference(run, score_old(run, feeds))) | probe_again(run, probed)
    weights = {n: float(w.double().square().sum()) for n, w in run.actor.weights() if w is not None}
    run.mesh.barrier()
    return {"statistics": statistics, "logp": logps, "weights": weights, "micro_batches": [len(f.micro_batches) for f in feeds]}


def results_of(folder: Path, cases: Sequence[Case | ReplayCase]) -> dict[str, Any]:
    """What was found in each case, by its name.

    Megatron forgets its groups but does not close them: one mesh a layout, not one a case, keeps sockets and threads few.
    """
    results: dict[str, Any] = {}
    for _, group in groupby(sorted(cases, key=lambda c: (c.layout or "", type(c).__name__)), key=lambda c: c.layout):
        same_layout = list(group)
        mesh = create_mesh(ParallelConfig(**same_layout[0].where.parallel))
        actors: dict[tuple[str, str], Actor] = {}
        for case in same_layout:
            faulthandler.dump_traceback_later(SECONDS_A_CASE, exit=True)  # a hang shows where
            if isinstance(case, Case):
                results[case.name] = measure(folder, case, mesh)
                continue
            key = (case.model, case.recompute)
            actors[key] = actors.get(key) or open_actor(folder, mesh, case)
            results[case.name] = watched(actors[key], mesh, case)
    faulthandler.cancel_dump_traceback_later()
    return results


def main() -> None:
    kinds: dict[str, type[Case] | type[ReplayCase]] = {"Case": Case, "ReplayCase": ReplayCase}
    folder, out = Path(sys.argv[1]), Path(sys.argv[3])
    cases = [kinds[kind](**fields) for kind, fields in json.loads(sys.argv[2])]
    prepare_process(threads=1)
    results = results_of(folder, cases)
    if launch_context()[0] == 0:
        out.write_text(json.dumps(results))
    destroy_mesh()


if __name__ == "__main__":
    main()
