"""The stages of a training step that work on packed tokens, in the order in which `loop.py` calls them. Each is collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from .actor import snapshot
from .actor.actor import with_old
from .actor.collect import sequences, to_leader
from .actor.critic import Critic
from .actor.feed import Feed, alignment, shard
from .actor.metrics import Metrics, reduce
from .actor.optimizer import learning_rate
from .data.packing import pack
from .experience import draw, hand_out_batch, record_scores, sample
from .files import write_json
from .methods import length_lr, mipu, vcpo
from .methods.objective import Denominators
from .methods.value_loss import explained_variance
from .rewards.verifiers import score_all
from .rollout.collector import collect
from .run import SCORING, Run
from .types import Batch, PackedBatch, Prompt, Trajectory, as_metric


def score_old(run: Run, feeds: Sequence[Feed]) -> list[Feed]:
    """Old log-probs under the weights that start the step, with replayed (R3) or recorded (R2) routes; or, in bypass, the engine's.

    The first mini-batch is trained on before any weight moves: its update's own forward says the same, so it is scored here only if
    something else must be kept of that forward.
    """
    if run.config.train.old_policy == "behaviour":
        return [_replace(f, [dataclasses.replace(b, old_logp_T=b.behaviour_logp_T) for b in f.micro_batches]) for f in feeds]
    routing = SCORING[run.config.replay.mode]
    needs = run.stack.needs
    everything = routing == "record" or needs & {"old_top_k", "router_shift"} or run.stack.find(vcpo.METHOD.name) is not None
    ready = [] if everything else list(feeds[:1])
    top_k = run.stack.candidates("old_top_k", run.actor.vocab_size)
    scored = [
        _replace(
            f,
            with_old(f.micro_batches, run.actor.score(f.micro_batches, routing, top_k=top_k, router_scores="router_shift" in needs)),
        )
        for f in feeds[len(ready) :]
    ]
    return ready + scored


def _replace(feed: Feed, micro_batches: list[PackedBatch]) -> Feed:
    return dataclasses.replace(feed, micro_batches=micro_batches)


def score_reference(run: Run, feeds: Sequence[Feed]) -> list[Feed]:
    """Log-probs under the frozen reference policy, on the routes that the update will replay."""
    if run.reference is None or "reference" not in run.stack.needs:
        return list(feeds)
    scored = []
    for feed in feeds:
        micro_batches = feed.micro_batches
        stats = run.reference.score(micro_batches, run.training_routing).stats
        if stats:
            micro_batches = [dataclasses.replace(b, reference_logp_T=s.logp_T) for b, s in zip(micro_batches, stats, strict=True)]
        scored.append(_replace(feed, micro_batches))
    return scored


def optimize(run: Run, feeds: Sequence[Feed], factor: float = 1.0) -> dict[str, float]:
    """One optimizer step a mini-batch; the metrics of all of them together.

    Args:
        factor: what the scheduled learning rate is multiplied by.
    """
    total = run.config.train.steps * run.config.train.mini_batches
    metrics, norms, lr = Metrics(), [], 0.0
    for index, feed in enumerate(feeds):
        if "router_shift" in run.stack.needs:
            feed = _with_router_shift(run, feed, moved=index > 0)
        lr = factor * learning_rate(run.config.optimizer, run.state.optimizer_step, total)
        update = run.actor.update(
            feed.micro_batches,
            run.stack,
            feed.over,
            lr,
            routing=run.training_routing,
            entropy=run.config.objective.entropy,
            salt=run.config.train.seed + 1_000_003 * run.state.optimizer_step,
            keep_old=run.records,
        )
        record_scores(run, feed, "old", update.old_logp)
        metrics.merge(update.metrics)
        norms.append(update.grad_norm)
        run.state = dataclasses.replace(run.state, optimizer_step=run.state.optimizer_step + 1)
    values = reduce(run.mesh, metrics)
    values["loss"] = values["loss"] / len(feeds)
    return values | {"grad_norm": float(np.mean(norms)), "lr": lr}


def _with_router_shift(run: Run, feed: Feed, *, moved: bool) -> Feed:
    """How far the routers' scores have moved since the start of the step; nothing has before the first optimizer step."""
    if moved:
        shifts = run.actor.router_shift(feed.micro_batches, run.training_routing)
    else:
        shifts = [torch.zeros_like(b.advantages_T) for b in feed.micro_batches]
    return _replace(feed, [dataclasses.replace(b, router_shift_T=x) for b, x in zip(feed.micro_batches, shifts, strict=True)])


def train_critic(run: Run, critic: Critic, feeds: Sequence[Feed]) -> dict[str, float]:
    """One optimizer step of the critic a mini-batch."""
    total = run.config.train.steps * run.config.train.mini_batches
    metrics, norms = Metrics(), []
    for index, feed in enumerate(feeds):
        targets = sum(int((b.mask_T & ~b.returns_T.isnan()).sum()) for b in feed.micro_batches if b.returns_T is not None)
        over = Denominators(
            tokens=float(sum(run.mesh.gather(targets if run.mesh.reports else 0))),
            sequences=feed.over.sequences,
            max_tokens=feed.over.max_tokens,
        )
        lr = learning_rate(run.config.critic.optimizer, run.state.step * run.config.train.mini_batches + index, total)
        update = critic.update(feed.micro_batches, over, lr)
        metrics.merge(update.metrics)
        norms.append(update.grad_norm)
    values = reduce(run.mesh, metrics)
    moments = {name: values.pop(f"critic/{name}") for name in ("residual_mean", "residual_square", "return_mean", "return_square")}
    values["critic/explained_variance"] = explained_variance(moments)
    values["critic/loss"] = values["critic/loss"] / len(feeds)
    return values | {"critic/grad_norm": float(np.mean(norms))}


def learning_rate_factor(run: Run, feeds: Sequence[Feed], mean_length: float) -> tuple[float, dict[str, float]]:
    """What the configured schedules (length_lr, vcpo) multiply the learning rate of this step by. Every rank gets the same answer."""
    factor, states = 1.0, dict(run.state.schedules)
    values: dict[str, float] = {}
    if (by_length := run.stack.find(length_lr.METHOD.name)) is not None:
        length, part = length_lr.length_lr(length_lr.LengthLRState(**states.get("length_lr", {})), mean_length, by_length)
        states["length_lr"], factor, values["length_lr/factor"] = dataclasses.asdict(length), factor * part, part
    if (by_weights := run.stack.find(vcpo.METHOD.name)) is not None:
        weights, part, share = vcpo.vcpo(vcpo.VCPOState(**states.get("vcpo", {})), _sequence_log_weights(run, feeds), by_weights)
        states["vcpo"], factor = dataclasses.asdict(weights), factor * part
        values |= {"vcpo/factor": part, "vcpo/effective_share": share}
    run.state = dataclasses.replace(run.state, schedules=states)
    return factor, values


def _sequence_log_weights(run: Run, feeds: Sequence[Feed]) -> list[float]:
    """sum of log old - log mu of each sequence of the step, over all ranks, in no particular order."""
    batches = [b for feed in feeds for b in feed.micro_batches]
    gaps = [b.old_logp_T.cpu() - b.behaviour_logp_T for b in batches if b.old_logp_T is not None]
    return [float(d.astype(np.float64).sum()) for d in sequences(run.mesh, batches, gaps)]


def take_snapshot(run: Run) -> snapshot.Snapshot | None:
    """What a rejected step is undone with; None where steps are not decided upon."""
    return snapshot.take(run.actor) if run.stack.find(mipu.METHOD.name) is not None else None


def keep_or_roll_back(run: Run, before: snapshot.Snapshot, earlier_step: int) -> dict[str, float]:
    """MIPU: the engines already hold the candidate weights; validation answers decide whether they stay.

    A rejected step leaves nothing behind but its weight version, which is never used again, and the count of decisions.
    """
    config = run.stack.find(mipu.METHOD.name)
    assert config is not None
    batches = -(-config.prompts // run.config.rollout.prompts_per_step)
    prompts = [prompt for _ in range(batches) for prompt in draw(run)][: -(-config.prompts // run.mesh.data_size)]
    answers = sample(run, prompts, config.samples, "decide")
    batch = Batch.without_advantages(answers) if run.mesh.is_leader else None
    feed = hand_out_batch(run, batch)
    scored = run.actor.score(feed.micro_batches, run.given_routing)
    logps = to_leader(run.mesh, feed.micro_batches, [s.logp_T for s in scored.stats], batch)
    terms: list[float] = []
    if batch is not None:
        ratios = [(x - t.behaviour_logp)[t.loss_mask] for x, t in zip(logps, answers, strict=True)]
        terms = mipu.gap_terms([t.reward or 0.0 for t in answers], ratios, config).tolist()
    everyone = [x for part in run.mesh.gather(terms) for x in part]
    decided, verdict = mipu.decide(mipu.MIPUState(**run.state.schedules.get("mipu", {})), float(np.mean(everyone)), config)
    run.state = dataclasses.replace(run.state, schedules={**run.state.schedules, "mipu": dataclasses.asdict(decided)})
    if not verdict.accepted:
        snapshot.restore(run.actor, before)
        run.state = dataclasses.replace(run.state, optimizer_step=earlier_step, weight_version=run.state.weight_version + 1)
        run.push_weights()
    return {
        "mipu/accepted": float(verdict.accepted),
        "mipu/forced": float(verdict.forced),
        "mipu/gap": verdict.gap,
        "mipu/tolerance": verdict.tolerance,
    }


def evaluate_policy(run: Run, *, greedy: bool = False) -> dict[str, float]:
    """Pass rate (share of answers with reward 1) on the held-out prompts, one answer each, from the servers' current weights."""
    metrics = Metrics()
    if run.mesh.broadcast(run.held_out is not None) is False:
        return {}
    if run.fleet is not None and run.held_out is not None and run.verifier is not None:
        sampling = dataclasses.replace(run.sampling, candidates=0)
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
        align = alignment(run.actor.place)
        packed = [
            shard(whole, run.actor.place)
            for whole in pack(
                batch,
                budget=1 << 30,
                multiple_of=align * run.mesh.tensor_size,
                align=align,
                micro_batches=run.actor.micro_batch_multiple,
                uniform=True,
            )
        ]
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
