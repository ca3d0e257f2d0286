"""Putting a run together and taking it down: process group, models, servers or a record, data, verifier, writers."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .actor.actor import Actor, Restriction
from .actor.base import MegatronModel
from .actor.checkpoint import TrainState, folders, load
from .actor.critic import Critic
from .actor.parallel import Mesh, create_mesh, destroy_mesh
from .config import Config, ModelFacts, check_against_model, read_model_facts
from .convert.families import family_for
from .convert.hf import read_config
from .data.prompts import PromptSource, load_tokenizer
from .methods.requirements import configured, wants_critic
from .record.files import LeaderFiles, leader_folder, leaders
from .record.recorder import Recorder
from .record.store import FOLDER, About
from .rewards.verifiers import build as build_verifier
from .rollout.fleet import Fleet
from .routing.payloads import RouteKind
from .run import Run, open_reference
from .source import FleetSource, Offline
from .sync.open import open_sync
from .telemetry.metrics import MetricWriter
from .telemetry.progress import Progress
from .telemetry.timers import Timers


@contextmanager
def open_run(config: Config, *, rollout: bool, trains: bool = True, offline: Offline | None = None) -> Iterator[Run]:
    """Builds a run and takes it down again, whatever happens inside.

    Args:
        rollout: whether answers are needed (not for supervised training): servers, prompts and a verifier, or `offline`.
        trains: False builds no optimizer and leaves the run's metrics as they are.
        offline: takes the place of all servers, and of this run's own checkpoints.

    Raises:
        ValueError: something in the configuration cannot work; before any server starts.
    """
    began = time.monotonic()
    facts = read_model_facts(config.model.path)
    if rollout:
        check_against_model(config, facts)
    stack, estimator = configured(config, facts)
    hf = read_config(config.model.path)
    folder = Path(config.logging.dir)
    with ExitStack() as closing:
        mesh = create_mesh(config.parallel, config.train.seed)
        closing.callback(destroy_mesh)
        if rollout and config.rollout.prompts_per_step % mesh.data_size:
            raise ValueError(
                f"rollout.prompts_per_step: {config.rollout.prompts_per_step} must be a multiple of the {mesh.data_size} data-parallel "
                "groups; change it or the layout"
            )
        folder.mkdir(parents=True, exist_ok=True)
        actor = Actor(config, mesh, family_for(hf), hf, trains=trains, restriction=Restriction.of(stack))
        critic = Critic(config, mesh, family_for(hf), hf) if trains and rollout and wants_critic(estimator) else None
        models: dict[str, MegatronModel] = {"actor": actor} | ({"critic": critic} if critic is not None else {})
        state, resumed_from = _load_state(config, models, facts, _start(config, folder) if offline is None else offline.start)
        progress = Progress(config.logging.progress, config.train.steps, title=str(folder), rank=mesh.rank, first=state.step)
        run = Run(config, facts, mesh, actor, stack, estimator, state, Timers(_synchronizer(mesh)), progress, folder, critic=critic)
        if mesh.is_main and trains:
            resume_step = state.step if resumed_from and offline is None else None
            run.writer = closing.enter_context(MetricWriter(folder, tensorboard=config.logging.tensorboard, resume_step=resume_step))
        run.note(f"layers: {actor.implementation}")
        if resumed_from:
            run.load_buffer(resumed_from)
            run.note(f"{'resumed' if offline is None else 'starts'} at step {state.step}, weight version {state.weight_version}")
        if trains and "reference" in stack.needs:
            run.reference = open_reference(config, mesh, facts, stack)
        if rollout:
            with run.timers("start"):
                _open_rollout(run, closing) if offline is None else _open_offline(run, offline)
        if rollout and trains:
            _open_record(run, closing)
        run.summary = {
            "megatron_core": version("megatron-core"),
            "sglang": _version_if_installed("sglang"),
            "torch": torch.__version__,
            "seed": config.train.seed,
            "objective": config.objective.name,
        }
        run.summary["seconds_to_start"] = round(time.monotonic() - began, 2)
        closing.enter_context(progress)
        yield run


def _version_if_installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # on GPUs the servers have an environment of their own
        return None


def _synchronizer(mesh: Mesh) -> Callable[[], None] | None:
    return torch.cuda.synchronize if mesh.device.type == "cuda" else None


def _start(config: Config, folder: Path) -> Path | None:
    """The newest whole checkpoint of this run, if there is one to go on from."""
    found = folders(folder / "checkpoints") if config.checkpoint.resume else []
    return found[-1] if found else None


def _load_state(config: Config, models: dict[str, MegatronModel], facts: ModelFacts, start: Path | None) -> tuple[TrainState, Path | None]:
    """Weights and state from a checkpoint, or from model.path; and the checkpoint again."""
    if start is not None:
        return load(start, models, facts.architecture), start
    models["actor"].load_hf(config.model.path)
    if "critic" in models:
        models["critic"].load_hf(config.critic.path or config.model.path)
    fresh = TrainState(
        step=0,
        optimizer_step=0,
        weight_version=0,
        seed=config.train.seed,
        architecture=facts.architecture,
        world_size=models["actor"].mesh.world_size,
        has_optimizer=config.checkpoint.save_optimizer,
    )
    return fresh, None


def _open_rollout(run: Run, closing: ExitStack) -> None:
    """Servers, weights in them, prompts and verifier."""
    config, mesh = run.config, run.mesh
    run.tokenizer, run.serves = load_tokenizer(config.model.path), True
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if run.estimator.method.name == "step_advantage":
        longest += config.rollout.max_new_tokens  # completions go on from prefixes of answers
    if mesh.is_main:
        run.note(f"servers: {', '.join(config.rollout.urls) or f'starting {config.rollout.launch}'}")
        run.fleet = closing.enter_context(
            Fleet.start(
                config.rollout,
                config.model,
                routes=run.wants_routes,
                log_dir=run.folder / "servers",
                context_length=longest,
                version=run.state.weight_version,
                seed=config.train.seed,
            )
        )
        run.sync = open_sync(config, run.facts, run.fleet, mesh.device)
        closing.callback(run.sync.close)
    urls = mesh.broadcast(run.fleet.urls if run.fleet else None)
    if mesh.is_leader and run.fleet is None:
        run.fleet = closing.enter_context(
            Fleet.connect(urls, config.rollout, config.model, routes=run.wants_routes, router=config.rollout.router)
        )
    if mesh.is_leader:
        run.prompts = PromptSource(config.data, run.tokenizer, config.train.seed, split="train")
        if config.data.source != "jsonl" or config.data.eval_path:
            run.held_out = PromptSource(config.data, run.tokenizer, config.train.seed, split="eval")
        run.verifier = build_verifier(config.reward, config.data)
        closing.callback(run.verifier.close)
        assert run.fleet is not None
        run.source = FleetSource(run.fleet, run.verifier, mesh.data_rank)
    run.push_weights()


def _open_offline(run: Run, offline: Offline) -> None:
    run.tokenizer = load_tokenizer(run.config.model.path)
    if run.mesh.is_leader:
        run.source = offline.open(run.mesh.data_rank, run.mesh.data_size)


def _open_record(run: Run, closing: ExitStack) -> None:
    """The record below the run's folder, going on where its state does."""
    config, mesh, actor = run.config.record, run.mesh, run.actor
    if not config.enabled:
        return
    run.records, root = True, run.folder / FOLDER
    if mesh.is_main:
        if run.state.step == 0:
            shutil.rmtree(root, ignore_errors=True)
        for former in leaders(root)[mesh.data_size :]:  # of a larger layout: the steps from here on are no longer theirs
            LeaderFiles(leader_folder(root, former), 2**63, None, run.state.step).close()
        facts = dataclasses.asdict(run.facts) | {name: version(name) for name in ("torch", "megatron-core")}
        About(dataclasses.asdict(run.config), mesh.data_size, mesh.world_size, facts).save(root)
    mesh.barrier()
    if mesh.is_leader:
        kind = RouteKind.smallest(actor.experts, actor.moe_layers, int(actor.core.moe_router_topk)) if run.facts.is_moe else None
        limit = int(config.max_gb * 1e9) // mesh.data_size
        run.recorder = Recorder(root, mesh.data_rank, limit=limit, kind=kind, first_step=run.state.step)
        closing.callback(run.recorder.close)
