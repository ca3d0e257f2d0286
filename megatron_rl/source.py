"""Where a leader's answers come from: SGLang servers, or what an earlier run recorded. The training loop cannot tell which."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .record.schema import Purpose
from .rewards.verifiers import Verifier, score_all
from .rollout.collector import Sampling, collect
from .rollout.fleet import Fleet
from .types import Origin, Prompt, Trajectory


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    step: int
    prompts: Sequence[Prompt]
    samples: int
    """Answers to each."""
    sampling: Sampling
    version: int
    """Weight version that every token must come from."""
    routes: bool
    """Whether answers carry the experts of their tokens."""
    purpose: Purpose


class Source(Protocol):
    """One leader's."""

    def answer(self, request: Request) -> list[Trajectory]:
        """Answers with their origins; those to one prompt next to each other, in the order of the prompts."""
        ...

    def judge(self, answers: Sequence[Trajectory]) -> list[Trajectory]:
        """The answers with their rewards."""
        ...


class Origins:
    """Numbers a leader's requests of each step from 0, and says of every answer which one it came with."""

    def __init__(self, leader: int) -> None:
        self._leader, self._step, self._next = leader, -1, 0

    def of_request(self, step: int, answers: Sequence[Trajectory]) -> list[Trajectory]:
        """The answers to the next request of `step`, with their origins."""
        self._step, self._next = step, self._next + 1 if step == self._step else 1
        return [dataclasses.replace(t, origin=Origin(step, self._leader, self._next - 1, i)) for i, t in enumerate(answers)]


class FleetSource:
    """Answers of the servers, judged by the verifier."""

    def __init__(self, fleet: Fleet, verifier: Verifier, leader: int) -> None:
        self._fleet, self._verifier, self._origins = fleet, verifier, Origins(leader)

    def answer(self, request: Request) -> list[Trajectory]:
        """Sampled now. Raises as `collect`."""
        found = collect(
            self._fleet,
            request.prompts,
            samples=request.samples,
            sampling=request.sampling,
            routes=request.routes,
            version=request.version,
            resume_aborted=self._fleet.config.resume_aborted,
        )
        return self._origins.of_request(request.step, found)

    def judge(self, answers: Sequence[Trajectory]) -> list[Trajectory]:
        """Raises as `score_all`."""
        return score_all(self._verifier, answers)


@dataclass(frozen=True)
class Offline:
    """A run without servers: it starts from what another was, and trains on what that one recorded."""

    start: Path | None
    """Checkpoint with the weights, optimizer and state to start from; None for model.path and step 0."""
    until: int
    """Step to end at."""
    open: Callable[[int, int], Source]
    """(this leader, number of leaders) -> its source."""
