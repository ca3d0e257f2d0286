"""What a step trains on: prompts drawn, answers sampled and judged, groups kept or replaced, advantages taken.

Each function that touches the fleet or a model is collective over all ranks; leaders hold the trajectories, the others none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .actor.balance import balance, model_cost
from .actor.collect import to_leader
from .actor.feed import Feed, alignment, hand_out
from .actor.metrics import Metrics, reduce
from .methods import dynamic_sampling, gae, group, kl_in_reward, overlong, popo, step_advantage
from .methods.dynamic_sampling import Group, by_group
from .record.schema import Purpose
from .run import Run
from .source import Request
from .types import Batch, PackedBatch, Prompt, Trajectory, as_metric

Arrays = list[NDArray[np.float32]]


def draw(run: Run) -> list[Prompt]:
    """This leader's share of the next batch of prompts; empty on ranks that do not lead. Counts the batch as drawn."""
    batch = run.state.prompt_batches
    run.state = dataclasses.replace(run.state, prompt_batches=batch + 1)
    if run.prompts is None:
        return []
    return run.prompts.batch(batch, run.config.rollout.prompts_per_step)[run.mesh.data_rank :: run.mesh.data_size]


def sample(run: Run, prompts: Sequence[Prompt], samples: int, purpose: Purpose = "train") -> list[Trajectory]:
    """This leader's answers to its prompts, judged, with the steps of each answer numbered; empty on ranks that do not lead."""
    if run.source is None:
        return []
    answers = run.source.answer(_request(run, prompts, samples, purpose))
    with run.timers("reward"):
        judged = run.source.judge([run.number_steps(t) for t in answers])
    if run.recorder is not None:
        run.recorder.sampled(judged, purpose)
    return judged


def _request(run: Run, prompts: Sequence[Prompt], samples: int, purpose: Purpose) -> Request:
    routes = run.wants_routes and purpose != "complete"  # completions are judged, and nothing is trained on them
    return Request(run.state.step, prompts, samples, run.sampling, run.state.weight_version, routes, purpose)


def gather_groups(run: Run) -> tuple[list[Trajectory], Metrics]:
    """The step's trajectories, after dynamic sampling, the overlong penalty and POPO's buffer, where they are configured."""
    wanted = run.config.rollout.prompts_per_step // run.mesh.data_size
    samples = run.config.rollout.samples_per_prompt
    metrics = Metrics()
    groups = by_group(sample(run, draw(run), samples))
    dynamic = run.stack.find(dynamic_sampling.METHOD.name)
    if dynamic is not None:
        rounds = 1
        # All leaders draw while any of them wants more: the order of prompts then depends on no leader alone.
        while rounds < dynamic.max_rounds and any(run.mesh.gather(bool(dynamic_sampling.missing(groups, wanted)) and run.mesh.is_leader)):
            prompts = draw(run)
            if dynamic_sampling.missing(groups, wanted):
                groups += by_group(sample(run, prompts, samples))
            rounds += 1
        groups = dynamic_sampling.select(groups, wanted)
        metrics.add({"dynamic_sampling/rounds": as_metric(rounds, 1.0)} if run.mesh.is_leader else {})
    metrics.merge(_rollout_metrics(run, [t for g in groups for t in g]))
    groups = _shaped(run, groups)  # after the choice: an all-right group whose answers differ in length is not informative
    buffered = run.stack.find(popo.METHOD.name)
    if buffered is not None and run.mesh.is_leader:
        groups, run.buffer, seen = popo.refill(groups, run.buffer, run.state.weight_version, buffered)
        metrics.add({f"popo/{name}": pair for name, pair in seen.items()})
    return [t for g in groups for t in g], metrics


def _shaped(run: Run, groups: list[Group]) -> list[Group]:
    """The groups with the overlong penalty in their rewards."""
    penalty = run.stack.find(overlong.METHOD.name)
    if penalty is None:
        return groups
    shaped = []
    for one in groups:
        added = overlong.overlong_penalty([t.response_tokens for t in one], penalty, run.config.rollout.max_new_tokens)
        shaped.append(tuple(dataclasses.replace(t, reward=(t.reward or 0.0) + float(a)) for t, a in zip(one, added, strict=True)))
    return shaped


def _rollout_metrics(run: Run, answers: Sequence[Trajectory]) -> Metrics:
    """Rewards, lengths, truncation and weight lag of what was sampled in this step."""
    if not answers:
        return Metrics()
    n = float(len(answers))
    rewards = torch.tensor([t.reward or 0.0 for t in answers], dtype=torch.float64)
    tokens = torch.tensor([t.response_tokens for t in answers], dtype=torch.float64)
    lags = torch.tensor([float(run.state.weight_version) * t.response_tokens - t.versions[t.loss_mask].sum() for t in answers])
    marked = [t.routes_valid for t in answers if t.routes_valid is not None]
    rows = float(sum(len(t.routes) for t in answers if t.routes is not None))
    masses = np.concatenate([t.kept_mass[t.loss_mask] for t in answers if t.kept_mass is not None] or [np.zeros(0, np.float32)])
    return Metrics().add(
        {
            "reward/mean": as_metric(rewards.sum(), n),
            "reward/square": as_metric(rewards.square().sum(), n),
            "response/length": as_metric(tokens.sum(), n),
            "response/truncated_share": as_metric(sum(t.finish_reason == "length" for t in answers), n),
            "lag/mean": as_metric(lags.sum(), tokens.sum()),
            "routing/unreplayable_share": as_metric(float(sum((~valid).sum() for valid in marked)), rows),
            "sampling/kept_mass": as_metric(float(masses.sum()), float(len(masses))),
        },
        totals={"response/tokens": tokens.sum()},
    )


def reduce_on_leaders(run: Run, metrics: Metrics) -> dict[str, float]:
    """The numbers of metrics that leaders gathered."""
    values = reduce(run.mesh, metrics, counts=run.mesh.is_leader)
    if "reward/square" in values:
        values["reward/std"] = max(0.0, values.pop("reward/square") - values["reward/mean"] ** 2) ** 0.5
    return values


# -- advantages ------------------------------------------------------------------------------------------------------------------


def take_advantages(run: Run, trajectories: list[Trajectory]) -> tuple[Batch | None, Metrics]:
    """The leader's batch with advantages spread over each answer's loss tokens, and the critic's targets where there is a critic."""
    batch = Batch.without_advantages(trajectories) if run.mesh.is_leader else None
    name, config = run.estimator.method.name, run.estimator.config
    values, kl = _scored_before_advantages(run, batch)
    if name == "step_advantage":
        return _step_advantages(run, batch, values, config.completions)
    if batch is None:
        if name == "gae" and config.whiten:
            run.mesh.gather(None)
        return None, Metrics()
    if name == "gae":
        return _gae(run, batch, values, kl), Metrics()
    answers = batch.trajectories
    rewards = [(t.reward or 0.0) + (float(kl[i].sum()) if kl else 0.0) for i, t in enumerate(answers)]
    valid = [t.finish_reason == "stop" or not run.config.advantage.reject_truncated for t in answers]
    taken = group.group_advantages(rewards, [t.group for t in answers], config, valid)
    return dataclasses.replace(batch, advantages=tuple(_on_loss(t, a) for t, a in zip(answers, taken, strict=True))), Metrics()


def _on_loss(trajectory: Trajectory, value: float) -> NDArray[np.float32]:
    return np.where(trajectory.loss_mask, value, 0.0).astype(np.float32)


def _scored_before_advantages(run: Run, batch: Batch | None) -> tuple[Arrays, Arrays]:
    """[N] a trajectory each: the critic's values, and what the distance to the reference adds to each token's reward.

    Each is empty where it is not configured. The batch is packed and handed out once for both.
    """
    config = run.stack.find(kl_in_reward.METHOD.name)
    if run.critic is None and config is None:
        return [], []
    micro_batches = hand_out_batch(run, batch).micro_batches
    values = [] if run.critic is None else to_leader(run.mesh, micro_batches, run.critic.values(micro_batches), batch)
    return values, [] if config is None else _kl_rewards(run, config, micro_batches, batch)


def _kl_rewards(run: Run, config: kl_in_reward.KLInRewardConfig, micro_batches: Sequence[PackedBatch], batch: Batch | None) -> Arrays:
    """[N] a trajectory: what the distance to the reference adds to each token's reward."""
    assert run.reference is not None, "requirements.py refuses kl_in_reward without a reference"
    per_model = [
        to_leader(run.mesh, micro_batches, [s.logp_T for s in model.score(micro_batches, run.given_routing).stats], batch)
        for model in (run.actor, run.reference)
    ]
    if batch is None:
        return []
    return [
        kl_in_reward.kl_in_reward(old, reference, t.loss_mask, config)
        for old, reference, t in zip(*per_model, batch.trajectories, strict=True)
    ]


def _gae(run: Run, batch: Batch, values: Arrays, kl: Arrays) -> Batch:
    config, masks = run.estimator.config, [t.loss_mask for t in batch.trajectories]
    pairs = []
    for i, t in enumerate(batch.trajectories):
        rewards = gae.reward_at_end(t.loss_mask, t.reward or 0.0) + (kl[i] if kl else 0.0)
        pairs.append(gae.gae(rewards, values[i], t.loss_mask, config.gamma, config.lam))
    advantages = [a for a, _ in pairs]
    if config.whiten:
        totals = sum((x for x in run.mesh.gather(gae.moments(advantages, masks)) if x is not None), np.zeros(3))
        advantages = gae.whiten(advantages, masks, totals)
    return dataclasses.replace(
        batch,
        advantages=tuple(advantages),
        values=tuple(np.nan_to_num(v) for v in values),
        returns=tuple(np.where(m, r, np.nan).astype(np.float32) for (_, r), m in zip(pairs, masks, strict=True)),
    )


def _step_advantages(run: Run, batch: Batch | None, values: Arrays, completions: int) -> tuple[Batch | None, Metrics]:
    """V(after) - V(before) of every step; V from completions of each prefix, or from the critic, which those completions train."""
    if batch is None:
        return None, Metrics()
    estimates = monte_carlo_values(run, batch.trajectories, completions)
    advantages, returns, errors = [], [], []
    for i, t in enumerate(batch.trajectories):
        starts = step_advantage.step_starts(t.turns)
        known = estimates[i] if not values else [float(values[i][s]) for s in starts]
        errors += [abs(a - b) for a, b in zip(known, estimates[i], strict=True)]
        taken = step_advantage.step_advantages(known, t.reward or 0.0)
        advantages.append(step_advantage.spread_steps(taken, t.turns))
        target = np.full(len(t.tokens), np.nan, np.float32)
        target[starts] = estimates[i]
        returns.append(target)
    metrics = Metrics().add({"step_advantage/critic_error": as_metric(sum(errors), float(len(errors)))} if values else {})
    learned = (tuple(np.nan_to_num(v) for v in values), tuple(returns)) if values else (None, None)
    return dataclasses.replace(batch, advantages=tuple(advantages), values=learned[0], returns=learned[1]), metrics


def monte_carlo_values(run: Run, answers: Sequence[Trajectory], completions: int) -> list[list[float]]:
    """For each answer, the value of the state before each of its steps: the mean reward of completions sampled on from there.

    The state before the first step is the prompt, whose completions are the answers of the group.
    """
    assert run.source is not None
    rewards_of: dict[str, list[float]] = {}
    for t in answers:
        rewards_of.setdefault(t.group, []).append(t.reward or 0.0)
    prefixes, owners = [], []
    for i, t in enumerate(answers):
        for step, start in enumerate(step_advantage.step_starts(t.turns)[1:], start=1):
            prefixes.append(Prompt(f"{t.prompt.id}/{i}.{step}", t.tokens[:start], "", t.prompt.answer, t.prompt.metadata))
            owners.append(i)
    sampled = run.source.answer(_request(run, prefixes, completions, "complete")) if prefixes else []
    judged = run.source.judge([_as_answer(run, answers[owners[i // completions]], t) for i, t in enumerate(sampled)])
    if run.recorder is not None:
        run.recorder.sampled(judged, "complete")
    rewards = [t.reward or 0.0 for t in judged]
    found = [[step_advantage.monte_carlo_value(rewards_of[t.group])] for t in answers]
    for i, owner in enumerate(owners):
        found[owner].append(step_advantage.monte_carlo_value(rewards[i * completions : (i + 1) * completions]))
    return found


def _as_answer(run: Run, original: Trajectory, continuation: Trajectory) -> Trajectory:
    """The continuation as an answer to the original prompt, for the verifier."""
    text = run.tokenizer.decode(continuation.tokens[len(original.prompt.tokens) :].tolist(), skip_special_tokens=True)
    return dataclasses.replace(continuation, prompt=original.prompt, text=text)


# -- recording -------------------------------------------------------------------------------------------------------------------


def record_batch(run: Run, step: int, batch: Batch | None) -> None:
    """This leader's answers of the step, with the advantages of those that are trained on."""
    if run.recorder is not None and batch is not None:
        run.recorder.batch(step, batch)


def record_scores(run: Run, feed: Feed, name: Literal["old", "flips"], found: Sequence[Tensor]) -> None:
    """What was found of a feed's first micro-batches, one [T] a micro-batch, on the last stage. Collective where the run records.

    Args:
        name: old log-probs, or layers routed otherwise than by the engine.
    """
    if run.records:
        arrays = to_leader(run.mesh, feed.micro_batches[: len(found)], found, feed.batch, everything=name == "old")
        if run.recorder is not None and feed.batch is not None:
            run.recorder.scored(run.state.step, feed.batch, **{name: arrays})


# -- packing -----------------------------------------------------------------------------------------------------------------------


def hand_out_batch(run: Run, batch: Batch | None) -> Feed:
    """A leader's batch, packed, with every rank's own share."""
    return hand_out(
        run.mesh,
        run.actor.places,
        batch,
        budget=run.config.train.tokens_per_micro_batch,
        experts=run.actor.experts,
        max_tokens=run.config.rollout.max_new_tokens,
        multiple=run.actor.micro_batch_multiple,
        cost=model_cost(run.actor.core, run.facts.vocab_size),
    )


def hand_out_mini_batches(run: Run, batch: Batch | None, step: int) -> list[Feed]:
    """Shuffles each leader's batch into mini-batches, evens each out over the leaders, and gives every rank its shards."""
    count = run.config.train.mini_batches
    parts: Sequence[Batch | None] = [None] * count
    if batch is not None:
        order = np.random.default_rng([run.config.train.seed, step]).permutation(len(batch.trajectories))
        parts = [batch.select(part.tolist()) for part in np.array_split(order, count)]
    cost, align = model_cost(run.actor.core, run.facts.vocab_size), alignment(run.actor.place)
    # Not before the split: every optimizer step waits for its slowest rank, and trains on what it would have without balance.
    return [hand_out_batch(run, balance(run.mesh, part, cost, align=align)) for part in parts]
