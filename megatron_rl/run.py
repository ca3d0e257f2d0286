"""A run: process group, models, source of answers, state, writers. `opening.py` puts it together, `loop.py` drives it."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .actor.actor import Actor, Restriction
from .actor.base import MegatronModel
from .actor.checkpoint import TrainState, save
from .actor.critic import Critic
from .actor.parallel import Mesh
from .config import Config, ModelFacts, read_model_facts
from .convert.families import family_for
from .convert.hf import read_config
from .data.prompts import PromptSource
from .methods.dynamic_sampling import Group
from .methods.stack import Part, Stack
from .record.recorder import Recorder
from .rewards.verifiers import Verifier
from .rollout.collector import Sampling
from .rollout.fleet import Fleet
from .routing.replay import Mode
from .source import Source
from .sync.control import WeightSync
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
    """What every command that trains has. Ranks that do not lead have no source; only rank 0 pushes weights and writes."""

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
    source: Source | None = None
    """Where this leader's answers come from."""
    fleet: Fleet | None = None
    """The servers that evaluations ask; None without any."""
    serves: bool = False
    """Whether there are servers that want new weights; the same on every rank."""
    records: bool = False
    """Whether what is seen is recorded; the same on every rank."""
    recorder: Recorder | None = None
    """Of this leader."""
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
        """The actor's weights into every server, if there is one, under the state's weight version. Collective."""
        if not self.serves:
            return
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
