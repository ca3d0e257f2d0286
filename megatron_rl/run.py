"""A run put together: process group, actor, servers, data, verifier, writers. `loop.py` drives it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .actor.actor import Actor
from .actor.checkpoint import TrainState, folders, load, save
from .actor.parallel import Mesh, create_mesh, destroy_mesh
from .config import Config, ModelFacts, check_against_model, read_model_facts
from .convert.families import family_for
from .convert.hf import read_config
from .data.prompts import PromptSource, load_tokenizer
from .methods.registry import LOOP_PROVIDES, Stack, build
from .rewards.verifiers import Verifier
from .rewards.verifiers import build as build_verifier
from .rollout.fleet import Fleet
from .sync.control import WeightSync
from .sync.open import open_sync
from .telemetry.metrics import MetricWriter, read_metrics
from .telemetry.progress import Progress
from .telemetry.timers import Timers


@dataclass
class Run:
    """What every command that trains has. Ranks that do not lead have no fleet; only rank 0 pushes weights and writes."""

    config: Config
    facts: ModelFacts
    mesh: Mesh
    actor: Actor
    stack: Stack
    state: TrainState
    timers: Timers
    progress: Progress
    folder: Path
    writer: MetricWriter | None = None
    fleet: Fleet | None = None
    sync: WeightSync | None = None
    prompts: PromptSource | None = None
    held_out: PromptSource | None = None
    verifier: Verifier | None = None
    tokenizer: Any = None
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def wants_routes(self) -> bool:
        """Whether the rollout must return routed experts: to replay them or to compare with them."""
        return self.facts.is_moe and (self.config.replay.mode == "R3" or self.config.replay.probe_every > 0)

    def note(self, text: str) -> None:
        """One line for people, from rank 0."""
        self.progress.note(text)

    def push_weights(self) -> None:
        """The actor's weights into every server, under the state's weight version. Collective."""
        weights = self.actor.weights(dtype=getattr(torch, self.config.rollout.dtype))
        if self.sync is None:
            for _ in weights:
                pass
        else:
            self.sync.push(((name, tensor) for name, tensor in weights if tensor is not None), self.state.weight_version)

    def save_checkpoint(self) -> Path:
        """Everything needed to go on from here. Collective."""
        return save(self.folder / "checkpoints", self.actor, self.state, self.config.checkpoint.keep)

    def save_if_due(self) -> None:
        """A checkpoint every checkpoint.every steps. Collective."""
        every = self.config.checkpoint.every
        if every and self.state.step % every == 0:
            with self.timers("checkpoint"):
                self.save_checkpoint()

    def export(self) -> Path:
        """The weights in Hugging Face format, in the trainer's dtype, to <folder>/hf. Collective."""
        target = self.folder / "hf"
        if self.mesh.is_main:
            shutil.rmtree(target, ignore_errors=True)
        self.actor.save_hf(target, self.config.model.path)
        return target


def write_json(path: Path, value: Any) -> None:
    """Writes value, readable by people, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


AVERAGES = {
    "tokens_per_second": "tokens_per_second",
    "k3_replay": "mismatch/k3_replay",
    "k3_live": "mismatch/k3_live",
    "route_mismatch_share": "routing/token_mismatch_share",
}
"""Names in summary.json and the metrics they are means of, over all steps of the run."""


def run_averages(folder: Path) -> dict[str, float | None]:
    """The means of `AVERAGES`; None for what was never measured."""
    rows = read_metrics(folder)
    found = {name: [row[metric] for row in rows if row.get(metric) is not None] for name, metric in AVERAGES.items()}
    return {name: sum(values) / len(values) if values else None for name, values in found.items()}


@contextmanager
def open_run(config: Config, *, rollout: bool, trains: bool = True) -> Iterator[Run]:
    """Builds a run and takes it down again, whatever happens inside.

    Args:
        rollout: whether servers, prompts and a verifier are needed (not for supervised training).
        trains: False builds no optimizer and leaves the run's metrics as they are.

    Raises:
        ValueError: something in the configuration cannot work; before any server starts.
    """
    began = time.monotonic()
    facts = read_model_facts(config.model.path)
    if rollout:
        check_against_model(config, facts)
    stack = build(config.objective, config.corrections)
    stack.check_available(LOOP_PROVIDES)
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
        actor = Actor(config, mesh, family_for(hf), hf, trains=trains)
        state, resumed = _load_state(config, actor, facts, folder)
        progress = Progress(config.logging.progress, config.train.steps, title=str(folder), rank=mesh.rank, first=state.step)
        run = Run(config, facts, mesh, actor, stack, state, Timers(_synchronizer(mesh)), progress, folder)
        if mesh.is_main and trains:
            resume_step = state.step if resumed else None
            run.writer = closing.enter_context(MetricWriter(folder, tensorboard=config.logging.tensorboard, resume_step=resume_step))
        run.note(f"layers: {actor.implementation}")
        if resumed:
            run.note(f"resumed at step {state.step}, weight version {state.weight_version}")
        if rollout:
            with run.timers("start"):
                _open_rollout(run, closing)
        run.summary = {
            "megatron_core": version("megatron-core"),
            "sglang": version("sglang"),
            "torch": torch.__version__,
            "seed": config.train.seed,
            "objective": config.objective.name,
        }
        run.summary["seconds_to_start"] = round(time.monotonic() - began, 2)
        closing.enter_context(progress)
        yield run


def _synchronizer(mesh: Mesh) -> Callable[[], None] | None:
    return torch.cuda.synchronize if mesh.device.type == "cuda" else None


def _load_state(config: Config, actor: Actor, facts: ModelFacts, folder: Path) -> tuple[TrainState, bool]:
    """Weights and state from the newest whole checkpoint of this run, or from model.path."""
    found = folders(folder / "checkpoints") if config.checkpoint.resume else []
    if found:
        return load(found[-1], actor, facts.architecture), True
    actor.load_hf(config.model.path)
    fresh = TrainState(
        step=0,
        optimizer_step=0,
        weight_version=0,
        seed=config.train.seed,
        architecture=facts.architecture,
        world_size=actor.mesh.world_size,
        has_optimizer=config.checkpoint.save_optimizer,
    )
    return fresh, False


def _open_rollout(run: Run, closing: ExitStack) -> None:
    """Servers, weights in them, prompts and verifier."""
    config, mesh = run.config, run.mesh
    run.tokenizer = load_tokenizer(config.model.path)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
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
    run.push_weights()
