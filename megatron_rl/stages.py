"""The stages of a training step, in the order in which `loop.py` calls them. Each is collective over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from .actor.actor import Scored, with_old
from .actor.feed import Feed, hand_out
from .actor.metrics import Metrics, mismatch, reduce
from .actor.optimizer import learning_rate
from .data.packing import pack
from .methods.advantages import group_advantages
from .rewards.verifiers import score_all
from .rollout.collector import Sampling, collect
from .routing.replay import Mode
from .run import Run, write_json
from .types import Batch, PackedBatch, Prompt, Trajectory, as_metric

SCORING: dict[str, Mode] = {"none": "live", "R2": "record", "R3": "replay"}
"""How the old-policy forward routes, by replay.mode."""

TRAINING: dict[str, Mode] = {"none": "live", "R2": "replay", "R3": "replay"}
"""How the optimizer step's forward routes."""


def sample(run: Run, step: int) -> list[Trajectory]:
    """This leader's answers to its share of the step's prompts; empty on ranks that do not lead."""
    if run.fleet is None or run.prompts is None:
        return []
    rollout = run.config.rollout
    prompts = run.prompts.batch(step, rollout.prompts_per_step)[run.mesh.data_rank :: run.mesh.data_size]
    return collect(
        run.fleet,
        prompts,
        samples=rollout.samples_per_prompt,
        sampling=Sampling.from_config(rollout),
        routes=run.wants_routes,
        version=run.state.weight_version,
    )


def judge(run: Run, trajectories: list[Trajectory]) -> Batch | None:
    """Rewards, then group advantages, spread over each answer's loss tokens."""
    if run.verifier is None:
        return None
    judged = score_all(run.verifier, trajectories)
    advantage = run.config.advantage
    values = group_advantages(
        [t.reward or 0.0 for t in judged], [t.group for t in judged], baseline=advantage.baseline, scale_by_std=advantage.scale_by_std
    )
    return Batch(tuple(judged), tuple(np.where(t.loss_mask, a, 0.0).astype(np.float32) for t, a in zip(judged, values, strict=True)))


def hand_out_mini_batches(run: Run, batch: Batch | None, step: int) -> list[Feed]:
    """Shuffles each leader's batch into mini-batches and gives every rank its shards."""
    count = run.config.train.mini_batches
    parts: Sequence[Batch | None] = [None] * count
    if batch is not None:
        order = np.random.default_rng([run.config.train.seed, step]).permutation(len(batch.trajectories))
        parts = [_choose(batch, part) for part in np.array_split(order, count)]
    return [_hand_out(run, part) for part in parts]


def _choose(batch: Batch, indices: np.ndarray) -> Batch:
    return Batch(tuple(batch.trajectories[i] for i in indices), tuple(batch.advantages[i] for i in indices))


def _hand_out(run: Run, batch: Batch | None) -> Feed:
    return hand_out(
        run.mesh,
        run.actor.places,
        batch,
        budget=run.config.train.tokens_per_micro_batch,
        experts=run.actor.experts,
        max_tokens=run.config.rollout.max_new_tokens,
        multiple=run.actor.micro_batch_multiple,
    )


def score_old(run: Run, feeds: Sequence[Feed]) -> list[Feed]:
    """Old log-probs under the weights that start the step, with replayed (R3) or recorded (R2) routes.

    The first mini-batch is trained on before any weight moves: its update's own forward says the same, so unless its routes must be
    recorded it is not scored here.
    """
    routing = SCORING[run.config.replay.mode]
    ready = [] if routing == "record" else list(feeds[:1])
    scored = [
        dataclasses.replace(f, micro_batches=with_old(f.micro_batches, run.actor.score(f.micro_batches, routing)))
        for f in feeds[len(ready) :]
    ]
    return ready + scored


def probe(run: Run, feed: Feed, step: int) -> dict[str, float]:
    """The gap to the engine on the first micro-batch, with the engine's routes and without: what replay removes."""
    every = run.config.replay.probe_every
    if not every or step % every or not run.wants_routes:
        return {}
    batches = feed.micro_batches[: run.actor.micro_batch_multiple]
    metrics = Metrics()
    live = run.actor.score(batches, "observe")
    metrics.merge(_routing_metrics(feed, live, run.actor.moe_layers)).merge(_mismatch(batches, live, "live"))
    return reduce(run.mesh, metrics.merge(_mismatch(batches, run.actor.score(batches, "replay"), "replay")))


def _mismatch(batches: Sequence[PackedBatch], scored: Scored, suffix: str) -> Metrics:
    metrics = Metrics()
    for batch, stats in zip(batches, scored.stats, strict=False):
        device = stats.logp_T.device
        means, maxima = mismatch(stats.logp_T, batch.behaviour_logp_T.to(device), batch.mask_T.to(device), suffix)
        metrics.add(means, maxima=maxima)
    return metrics


def _routing_metrics(feed: Feed, scored: Scored, moe_layers: int) -> Metrics:
    """How many tokens (and token-layers) the trainer would route otherwise than the engine did; padding left out."""
    metrics = Metrics()
    for batch, differing_T in zip(feed.micro_batches, scored.differing, strict=False):
        real_T = batch.sequence_T < int((batch.sample_S >= 0).sum())
        count = real_T.sum()
        metrics.add(
            {
                "routing/token_mismatch_share": as_metric((real_T & (differing_T > 0)).sum(), count),
                "routing/layer_mismatch_share": as_metric(torch.where(real_T, differing_T, 0).sum(), count * moe_layers),
            }
        )
    return metrics


def optimize(run: Run, feeds: Sequence[Feed]) -> dict[str, float]:
    """One optimizer step a mini-batch; the metrics of all of them together."""
    total = run.config.train.steps * run.config.train.mini_batches
    routing = TRAINING[run.config.replay.mode] if run.facts.is_moe else "live"
    metrics, norms, lr = Metrics(), [], 0.0
    for feed in feeds:
        lr = learning_rate(run.config.optimizer, run.state.optimizer_step, total)
        update = run.actor.update(feed.micro_batches, run.stack, feed.over, lr, routing=routing, entropy=run.config.objective.entropy)
        metrics.merge(update.metrics)
        norms.append(update.grad_norm)
        run.state = dataclasses.replace(run.state, optimizer_step=run.state.optimizer_step + 1)
    values = reduce(run.mesh, metrics)
    values["loss"] = values["loss"] / len(feeds)
    return values | {"grad_norm": float(np.mean(norms)), "lr": lr}


def rollout_metrics(run: Run, batch: Batch | None) -> dict[str, float]:
    """Rewards, lengths and weight lag over all leaders."""
    metrics = Metrics()
    if batch is not None:
        answers = batch.trajectories
        n = float(len(answers))
        rewards = torch.tensor([t.reward or 0.0 for t in answers], dtype=torch.float64)
        tokens = torch.tensor([t.response_tokens for t in answers], dtype=torch.float64)
        lags = torch.tensor([float(run.state.weight_version) * t.response_tokens - t.versions[t.loss_mask].sum() for t in answers])
        metrics.add(
            {
                "reward/mean": as_metric(rewards.sum(), n),
                "reward/square": as_metric(rewards.square().sum(), n),
                "response/length": as_metric(tokens.sum(), n),
                "response/truncated_share": as_metric(torch.tensor(float(sum(t.finish_reason == "length" for t in answers))), n),
                "lag/mean": as_metric(lags.sum(), tokens.sum()),
            },
            totals={"response/tokens": tokens.sum()},
        )
    values = reduce(run.mesh, metrics, counts=run.mesh.is_leader)
    spread = max(0.0, values.pop("reward/square") - values["reward/mean"] ** 2)
    return values | {"reward/std": spread**0.5}


def evaluate_policy(run: Run, *, greedy: bool = False) -> dict[str, float]:
    """Pass rate (share of answers with reward 1) on the held-out prompts, one answer each, from the servers' current weights."""
    metrics = Metrics()
    if run.mesh.broadcast(run.held_out is not None) is False:
        return {}
    if run.fleet is not None and run.held_out is not None and run.verifier is not None:
        sampling = Sampling.from_config(run.config.rollout)
        sampling = dataclasses.replace(sampling, temperature=0.0) if greedy else sampling
        mine = run.held_out.prompts[: run.config.data.eval_size][run.mesh.data_rank :: run.mesh.data_size]
        answers = score_all(
            run.verifier, collect(run.fleet, mine, samples=1, sampling=sampling, routes=False, version=run.state.weight_version)
        )
        passed = torch.tensor([float((t.reward or 0.0) >= 1.0) for t in answers])
        name = "eval/greedy_pass_rate" if greedy else "eval/pass_rate"
        metrics.add({name: as_metric(passed.sum(), float(len(answers)))})
    return reduce(run.mesh, metrics, counts=run.mesh.is_leader)


def greedy_answers(run: Run, prompts: Sequence[Prompt], max_new_tokens: int, stop: int) -> list[list[int]]:
    """The trainer's own greedy continuations, stop token included. Every rank passes the same prompts and gets all answers."""
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        open_answers = [i for i, a in enumerate(answers) if not a or a[-1] != stop]
        if not open_answers:
            break
        batch = Batch(*zip(*(_unlabelled(prompts[i], answers[i]) for i in open_answers), strict=True))
        packed = pack(batch, budget=1 << 30, multiple_of=run.mesh.tensor_size, micro_batches=run.actor.micro_batch_multiple, uniform=True)
        for micro_batch, chosen in zip(packed, run.actor.next_tokens(packed), strict=True):
            for sequence, token in zip(micro_batch.sample_S.tolist(), chosen.tolist(), strict=True):
                if sequence >= 0:
                    answers[open_answers[sequence]].append(token)
    return answers


GREEDY_PROMPTS = 16
"""Held-out prompts whose greedy answers are written beside an export, for other engines to be compared with."""


def write_greedy_answers(run: Run) -> None:
    """<run>/greedy.json: prompts, and the answers of the weights just exported, as token ids."""
    prompts = list(run.held_out.prompts[:GREEDY_PROMPTS]) if run.held_out is not None else []
    prompts = run.mesh.broadcast(prompts)
    answers = greedy_answers(run, prompts, run.config.rollout.max_new_tokens, run.tokenizer.eos_token_id)
    if run.mesh.is_main:
        rows = [{"prompt": p.tokens.tolist(), "answer": a} for p, a in zip(prompts, answers, strict=True)]
        write_json(run.folder / "greedy.json", rows)


def _unlabelled(prompt: Prompt, answer: list[int]) -> tuple[Trajectory, np.ndarray]:
    """Tokens to be continued; one token more stands at the end, since a trajectory of N tokens fills N - 1 positions."""
    tokens = np.concatenate([prompt.tokens, np.asarray([*answer, 0], dtype=np.int32)]).astype(np.int32)
    nothing = np.full(len(tokens), -1, dtype=np.int32)
    mask = np.zeros(len(tokens), dtype=bool)
    nan = np.full(len(tokens), np.nan, dtype=np.float32)
    return Trajectory(prompt, prompt.id, tokens, mask, nan, nothing, nothing, None, "length", ""), np.zeros(len(tokens), np.float32)
