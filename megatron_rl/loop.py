"""The training loop on a page: collect, judge, pack, score, train, sync, log, save."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from .actor.feed import Feed
from .actor.parallel import prepare_process
from .config import Config
from .data.prompts import load_tokenizer
from .data.supervised import load_supervised
from .experience import gather_groups, hand_out_mini_batches, record_batch, reduce_on_leaders, take_advantages
from .files import write_json
from .opening import open_run
from .probe import probe, probe_again
from .run import Run, run_averages
from .source import Offline
from .stages import (
    evaluate_policy,
    keep_or_roll_back,
    learning_rate_factor,
    optimize,
    score_old,
    score_reference,
    take_snapshot,
    train_critic,
    write_greedy_answers,
)
from .telemetry.report import write_report
from .types import Batch


def train(config: Config, offline: Offline | None = None) -> None:
    """Reinforcement learning from the newest checkpoint of this run, or from model.path; or, offline, on what another run recorded."""
    prepare_process(config.train.threads)
    with open_run(config, rollout=True, offline=offline) as run:
        began = time.monotonic()
        with run.timers("eval"):
            before = evaluate_policy(run)
        log(run, before)
        for step in range(run.state.step, config.train.steps if offline is None else offline.until):
            values = train_step(run, step)
            if config.train.eval_every and run.state.step % config.train.eval_every == 0 and run.state.step < config.train.steps:
                with run.timers("eval"):
                    values |= evaluate_policy(run)
            log(run, values)
            run.save_if_due()
        finish(run, before, began)


def train_step(run: Run, step: int) -> dict[str, float]:
    """One rollout and its optimizer steps; the new weights are in the servers when it returns."""
    began = time.monotonic()
    with run.timers("rollout"):
        trajectories, gathered = gather_groups(run)
    with run.timers("advantages"):
        batch, taken = take_advantages(run, trajectories)
        record_batch(run, step, batch)
        values = reduce_on_leaders(run, gathered.merge(taken))
    with run.timers("pack"):
        feeds = hand_out_mini_batches(run, batch, step)
    with run.timers("probe"):
        seen, probed = probe(run, feeds[0], step)
        values |= seen
    with run.timers("old log-probs"):
        feeds = score_reference(run, score_old(run, feeds))
        factor, seen = learning_rate_factor(run, feeds, values["response/length"])
    values |= seen
    if run.critic is not None:
        with run.timers("critic"):
            values |= train_critic(run, run.critic, feeds)
    if run.critic is None or step >= run.config.critic.warmup_steps:
        values |= improve(run, feeds, factor)
        with run.timers("probe"):
            values |= probe_again(run, probed)
    run.state = dataclasses.replace(run.state, step=step + 1)
    seconds = time.monotonic() - began
    rate = {"tokens_per_second": values.pop("response/tokens") / seconds, "seconds/step": seconds}
    return values | rate | {"weight_version": float(run.state.weight_version)}


def improve(run: Run, feeds: list[Feed], factor: float) -> dict[str, float]:
    """The policy's optimizer steps, its new weights in the servers, and the decision whether they stay."""
    earlier_step = run.state.optimizer_step
    with run.timers("update"):
        before = take_snapshot(run)
        values = optimize(run, feeds, factor)
    with run.timers("sync"):
        run.state = dataclasses.replace(run.state, weight_version=run.state.weight_version + 1)
        run.push_weights()
    if before is not None:
        with run.timers("decide"):
            values |= keep_or_roll_back(run, before, earlier_step)
    return values


def sft(config: Config) -> None:
    """Supervised training on data.path with `nll`, through the same packing, actor and optimizer."""
    prepare_process(config.train.threads)
    if config.objective.name != "nll":
        raise ValueError(f"objective.name: {config.objective.name!r} needs rewards, and sft has none; set it to nll")
    if config.data.path is None:
        raise ValueError("data.path: None must name a .jsonl file of prompts and completions")
    with open_run(config, rollout=False) as run:
        began = time.monotonic()
        examples = []
        if run.mesh.is_leader:
            tokenizer = load_tokenizer(config.model.path)
            examples = load_supervised(config.data.path, tokenizer, eos=True, chat_template=config.data.chat_template)
        for step in range(run.state.step, config.train.steps):
            started = time.monotonic()
            batch = None
            if run.mesh.is_leader:
                chosen = np.random.default_rng([config.train.seed, step]).choice(len(examples), config.train.batch_size)
                mine = [examples[i] for i in chosen[run.mesh.data_rank :: run.mesh.data_size]]
                batch = Batch.without_advantages(mine)
            with run.timers("pack"):
                feeds = hand_out_mini_batches(run, batch, step)
            with run.timers("update"):
                values = optimize(run, feeds)
            run.state = dataclasses.replace(run.state, step=step + 1, weight_version=run.state.weight_version + 1)
            log(run, values | {"seconds/step": time.monotonic() - started})
            run.save_if_due()
        finish(run, {}, began)


def evaluate(config: Config) -> None:
    """Pass rates, sampled and greedy, of the newest checkpoint of this run, or of model.path."""
    prepare_process(config.train.threads)
    with open_run(config, rollout=True, trains=False) as run:
        values = evaluate_policy(run) | evaluate_policy(run, greedy=True)
        run.note(", ".join(f"{name} {value:.4f}" for name, value in values.items()))


def log(run: Run, values: dict[str, float]) -> None:
    """To the files and to people."""
    values = values | run.timers.drain()
    if run.writer is not None and values:
        run.writer.write(run.state.step, values)
    run.progress.update(run.state.step, values)


def finish(run: Run, before: dict[str, float], began: float) -> None:
    """The last evaluation, checkpoint, export, summary and report."""
    after = {}
    if before:
        with run.timers("eval"):
            after = evaluate_policy(run)
    with run.timers("checkpoint"):
        folder = run.save_checkpoint()
        exported = run.export() if run.config.checkpoint.export else None
    if exported and before:
        with run.timers("greedy answers"):
            write_greedy_answers(run)
    log(run, after)
    run.summary |= {
        "steps": run.state.step,
        "seconds": round(time.monotonic() - began, 2),
        "seconds_by_phase": {k: round(v, 2) for k, v in run.timers.totals.items()},
        "pass_rate_before": before.get("eval/pass_rate"),
        "pass_rate_after": after.get("eval/pass_rate"),
        "checkpoint": str(folder),
        "export": str(exported) if exported else None,
    }
    if run.mesh.is_main:
        run.summary |= run_averages(run.folder)
        write_json(run.folder / "summary.json", run.summary)
        run.note(f"checkpoint {folder}" + (f", Hugging Face export {exported}" if exported else ""))
        run.note(f"metrics {run.folder / 'metrics.jsonl'}, report {write_report(run.folder)}")
