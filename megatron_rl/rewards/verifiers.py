"""What an answer is worth: verifiers behind one protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from megatron_rl.config import DataConfig, RewardConfig
from megatron_rl.rewards.process import WorkerProcess
from megatron_rl.types import Trajectory


class Verifier(Protocol):
    """Judges finished answers. It may keep processes; `close` ends them. Safe to call from several threads."""

    timeouts: int
    """Answers so far that took longer than reward.timeout and were given 0."""

    def score(self, trajectory: Trajectory) -> float:
        """The reward of one answer, from its text and its prompt's reference; never from its tokens."""
        ...

    def close(self) -> None:
        """Frees what the verifier holds."""
        ...


class FinalAnswer:
    """1.0 where the text after the last marker is exactly the reference answer, white space around it aside, else 0.0.

    An answer without the marker earns nothing; with an empty marker the whole text is compared.
    """

    timeouts = 0

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def score(self, trajectory: Trajectory) -> float:
        """See the class."""
        if not self._marker:
            return float(trajectory.text.strip() == trajectory.prompt.answer.strip())
        _, found, final = trajectory.text.rpartition(self._marker)
        return float(bool(found) and final.strip() == trajectory.prompt.answer.strip())

    def close(self) -> None:
        """Nothing to free."""


class InWorker:
    """A checker of another package, run in a process of its own; an answer that takes too long earns 0.0 and is counted."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.timeouts = 0

    def score(self, trajectory: Trajectory) -> float:
        """See the class.

        Raises:
            ValueError: the reference answer cannot be used; names the prompt.
            RuntimeError: the checker failed or died.
        """
        prompt = trajectory.prompt
        fields = {"answer": prompt.answer, "question": prompt.text, "metadata": dict(prompt.metadata)}
        try:
            value = self._worker.score(trajectory.text, fields)
        except ValueError as mistake:
            raise ValueError(f"prompt {prompt.id}: {mistake}") from mistake
        if value is None:
            self.timeouts += 1
            return 0.0
        return value

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()


def build(config: RewardConfig, data: DataConfig) -> Verifier:
    """The verifier that `config.verifier` names.

    Raises:
        ValueError: its package is missing, or it cannot judge this data.
    """
    if config.verifier == "final-answer":
        return FinalAnswer(config.marker)
    if config.verifier == "math-verify":
        worker = WorkerProcess({"kind": "math-verify"}, config.timeout, package="math-verify", extra="math")
        return InWorker(worker)
    if data.source != "reasoning-gym":
        raise ValueError(
            f"reward.verifier: 'reasoning-gym' needs data.source reasoning-gym, not {data.source!r}: the task judges its own questions; "
            "take final-answer or math-verify"
        )
    options = {"kind": "reasoning-gym", "task": data.task, "task_args": dict(data.task_args), "marker": config.marker}
    return InWorker(WorkerProcess(options, config.timeout, package="reasoning-gym", extra="tasks"))


def score_all(verifier: Verifier, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories, in order, with their rewards.

    Raises:
        ValueError: a verifier gave no finite number.
    """
    scored = []
    for trajectory in trajectories:
        reward = verifier.score(trajectory)
        if not math.isfinite(reward):
            raise ValueError(f"reward.verifier: {type(verifier).__name__} gave {reward} to an answer of prompt {trajectory.prompt.id}")
        scored.append(replace(trajectory, reward=reward))
    return scored
