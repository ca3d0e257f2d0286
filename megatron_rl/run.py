"""A run put together: process group, actor, servers, data, verifier, writers. `loop.py` drives it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .actor.actor import Actor, Restriction
from .actor.base import MegatronModel
from .actor.checkpoint import TrainState, folders, load, save
from .actor.critic import Critic
from .actor.parallel import Mesh, create_mesh, destroy_mesh
from .config import Config, ModelFacts, check_against_model, read_model_facts
from .convert.families import family_for
from .convert.hf import read_config
from .data.prompts import PromptSource, load_tokenizer
from .methods.dynamic_sampling import Group
from .methods.requirements import configured, wants_critic
from .methods.stack import Part, Stack
from .rewards.verifiers import Verifier
from .rewards.verifiers import build as build_verifier
from .rollout.collector import Sampling
from .rollout.fleet import Fleet
from .routing.replay import Mode
from .sync.control import WeightSync
from .sync.open import open_sync
from .telemetry.metrics import MetricWriter, read_metrics
from .telemetry.progress import Progress
from .telemetry.timers import Timers
from .types import Trajectory

SCORING: dict[str, Mode] = {"none": "live", "R2": "record", "R3": "replay"}
"""How the old-policy forward routes, by replay.mode."""

TRAINING: dict[str, Mode] = {"none": "live", "R2": "replay", "R3": "replay"}
"""How the optimizer step's forward routes, by replay.mode."""


@dataclass
class Run:
    """What every command that trains has. Ranks that do not lead have no fleet; only rank 0 pushes weights and writes."""

    config: Config
    facts: ModelFacts
    mesh: Mesh
    actor: Actor
    stack: Stack
    estimator: Part
    """How rewards become advantages."""
    state: TrainState
    timers: Timers
    progress: Progress
    folder: Path
    critic: Critic | None = None
    reference: Actor | None = None
    writer: MetricWriter | None = None
    fleet: Fleet | None = None
    sync: WeightSync | None = None
    prompts: PromptSource | None = None
    held_out: PromptSource | None = None
    verifier: Verifier | None = None
    tokenizer: Any = None
    buffer: tuple[Group, ...] = ()
    """POPO's stored groups of this leader, oldest first."""
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def wants_routes(self) -> bool:
        """Whether the rollout must return routed experts: to replay them or to compare with them."""
        return self.facts.is_moe and (self.config.replay.mode == "R3" or self.config.replay.probe_every > 0)

    @property
    def training_routing(self) -> Mode:
        """How the optimizer step's forward routes, and every forward that is compared with it."""
        return TRAINING[self.config.replay.mode] if self.facts.is_moe else "live"

    @property
    def given_routing(self) -> Mode:
        """How a forward routes that no other one follows: by the engine's routes where they are replayed, live elsewhere."""
        return "replay" if self.config.replay.mode == "R3" else "live"

    @property
    def sampling(self) -> Sampling:
        """As training samples."""
        return Sampling.from_config(self.config.rollout, candidates=self.stack.candidates("behaviour_top_k", self.facts.vocab_size))

    @cached_property
    def _ends_step(self) -> NDArray[np.bool_]:
        """[V] whether a token's text holds data.step_delimiter."""
        delimiter = self.config.data.step_delimiter
        assert delimiter is not None
        texts = self.tokenizer.batch_decode([[i] for i in range(self.facts.vocab_size)])
        return np.array([delimiter in text for text in texts], dtype=bool)

    def number_steps(self, answer: Trajectory) -> Trajectory:
        """The answer with its tokens' turns counted by data.step_delimiter; as it is without one.

        Raises:
            ValueError: no token of the vocabulary holds the delimiter.
        """
        if self.config.data.step_delimiter is None:
            return answer
        if not self._ends_step.any():
            raise ValueError(
                f"data.step_delimiter: {self.config.data.step_delimiter!r} is in no token's text; "
                "choose a text that the tokenizer keeps whole"
            )
        sampled = answer.tokens[answer.loss_mask]
        steps = np.cumsum(np.append(False, self._ends_step[sampled][:-1]))
        turns = np.full_like(answer.turns, -1)
        turns[answer.loss_mask] = steps
        return dataclasses.replace(answer, turns=turns)

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
        return save(self.folder / "checkpoints", self.models, self.state, self.config.checkpoint.keep, extra=self._save_buffer)

    @property
    def models(self) -> dict[str, MegatronModel]:
        """What a checkpoint holds."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def _save_buffer(self, folder: Path) -> None:
        if self.mesh.is_leader and self.buffer:
            (folder / f"{BUFFER}_{self.mesh.data_rank}.pickle").write_bytes(pickle.dumps(self.buffer))

    def load_buffer(self, folder: Path) -> None:
        """POPO's groups of this leader, as the checkpoint has them; none where the layout had fewer leaders."""
        file = folder / f"{BUFFER}_{self.mesh.data_rank}.pickle"
        if self.mesh.is_leader and file.is_file():
            self.buffer = pickle.loads(file.read_bytes())

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


BUFFER = "popo_buffer"
"""Name of the files in a checkpoint that hold POPO's stored groups, one a data-parallel leader."""


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
        state, resumed_from = _load_state(config, models, facts, folder)
        progress = Progress(config.logging.progress, config.train.steps, title=str(folder), rank=mesh.rank, first=state.step)
        run = Run(config, facts, mesh, actor, stack, estimator, state, Timers(_synchronizer(mesh)), progress, folder, critic=critic)
        if mesh.is_main and trains:
            resume_step = state.step if resumed_from else None
            run.writer = closing.enter_context(MetricWriter(folder, tensorboard=config.logging.tensorboard, resume_step=resume_step))
        run.note(f"layers: {actor.implementation}")
        if resumed_from:
            run.load_buffer(resumed_from)
            run.note(f"resumed at step {state.step}, weight version {state.weight_version}")
        if trains and "reference" in stack.needs:
            run.reference = open_reference(config, mesh, facts, stack)
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


def open_reference(config: Config, mesh: Mesh, facts: ModelFacts, stack: Stack) -> Actor:
    """The frozen policy.

    Raises:
        ValueError: its architecture is not the policy's.
    """
    path = config.reference.path
    assert path is not None
    other = read_model_facts(path)
    if (other.architecture, other.vocab_size) != (facts.architecture, facts.vocab_size):
        raise ValueError(
            f"reference.path: {path!r} is a {other.architecture} with {other.vocab_size} tokens, the policy a {facts.architecture} with "
            f"{facts.vocab_size}; they must share architecture and vocabulary"
        )
    hf = read_config(path)
    reference = Actor(config, mesh, family_for(hf), hf, trains=False, restriction=Restriction.of(stack))
    reference.load_hf(path)
    return reference


def _load_state(config: Config, models: dict[str, MegatronModel], facts: ModelFacts, folder: Path) -> tuple[TrainState, Path | None]:
    """Weights and state from the newest whole checkpoint of this run, or from model.path; and which checkpoint it was."""
    found = folders(folder / "checkpoints") if config.checkpoint.resume else []
    if found:
        return load(found[-1], models, facts.architecture), found[-1]
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
    run.tokenizer = load_tokenizer(config.model.path)
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
    run.push_weights()
