"""Training again on what a run recorded, without servers: as it was, to the last bit in fp32, or by another method.

What the servers said is all that is taken from the record. Everything after it (choice of groups, penalties, advantages, packing,
updates) is done again by the training loop itself, so another method sees what it would have seen had those answers been its own. From
the second step on they were sampled by the recorded run's weights, not by its own: the drift between the two is what importance
sampling corrects, and what `mismatch/k3_trained` shows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from ..actor.checkpoint import folders, read_state
from ..methods.dynamic_sampling import by_group
from ..record.schema import Purpose
from ..record.store import FOLDER, Store
from ..source import Offline, Origins, Request
from ..types import Trajectory

NO_DATA: tuple[str, ...] = ("--data.source", "reasoning-gym", "--data.path", "null", "--data.eval_path", "null")
"""A replay reads no prompts, and their files may be gone."""

_Calls = dict[Purpose, list[list[Trajectory]]]
"""The answers to each request, by what it was for."""


class RecordedSource:
    """A leader's answers out of a record. Judged already: rewards are the recorded ones.

    Where the record has as many leaders as the replay, each gets its own answers in their order, which is what makes a replay equal to
    the last bit; otherwise groups are dealt out in turn. Origins are the replay's own, for it may be recorded itself.
    """

    def __init__(self, store: Store, leader: int, leaders: int) -> None:
        self._store, self._leader, self._leaders = store, leader, leaders
        self._origins = Origins(leader)
        self._step = -1
        self._calls: _Calls = {}

    def answer(self, request: Request) -> list[Trajectory]:
        """What was answered to the request of that purpose and number in that step, whatever is asked.

        Raises:
            ValueError: the step is not whole in the record, or had fewer requests.
        """
        if request.step != self._step:
            self._step, self._calls = request.step, self._read(request.step)
        left = self._calls.get(request.purpose, [])
        if not left:
            raise ValueError(
                f"step {request.step}: the method asks for more answers (purpose {request.purpose}) than were recorded; replay with one "
                "that samples as the run did, or limit it, as dynamic_sampling's max_rounds does"
            )
        return self._origins.of_request(request.step, left.pop(0))

    def judge(self, answers: Sequence[Trajectory]) -> list[Trajectory]:
        """As they are."""
        return list(answers)

    def _read(self, step: int) -> _Calls:
        """The step's requests of each purpose, in order."""
        by_leader: dict[int, _Calls] = {}
        for _, found in groupby(self._store.sampled(step), key=lambda a: (a.origin.leader, a.origin.call)):
            answers = list(found)
            calls = by_leader.setdefault(answers[0].origin.leader, {})
            calls.setdefault(answers[0].purpose, []).append([a.trajectory for a in answers])
        if set(by_leader) == set(range(self._leaders)):
            return by_leader[self._leader]
        return self._dealt(by_leader.values())

    def _dealt(self, by_leader: Collection[_Calls]) -> _Calls:
        """This leader's groups of what all recorded leaders asked for at a time; some may have asked more often than others."""
        dealt: _Calls = {}
        for purpose in {purpose for calls in by_leader for purpose in calls}:
            for parts in zip_longest(*(calls.get(purpose, []) for calls in by_leader), fillvalue=()):
                groups = by_group([t for part in parts for t in part])
                dealt.setdefault(purpose, []).append([t for group in groups[self._leader :: self._leaders] for t in group])
        return dealt


def recorded_config(run: Path) -> dict[str, Any]:
    """The configuration of a recorded run.

    Raises:
        ValueError: the folder holds no record.
    """
    return dict(Store(run / FOLDER).about.config)


def plan(run: Path, from_step: int, steps: int) -> Offline:
    """What a replay starts from and ends with.

    Args:
        run: the logging.dir of the recorded run.
        from_step: the first step to train again.
        steps: train.steps of the replay.

    Raises:
        ValueError: the step is not in the record, or there are no weights to start it from; names the nearest that has both.
    """
    store = Store(run / FOLDER)
    starts: dict[int, Path | None] = {0: None} | {read_state(f).step: f for f in folders(run / "checkpoints")}
    missing = store.missing(from_step)
    if from_step not in starts or missing:
        why = f"cannot be replayed: {missing}" if missing else f"has no checkpoint below {run / 'checkpoints'}"
        raise ValueError(f"--from_step: {from_step} {why}; {_nearest(store, starts, from_step)}")
    last = store.steps[-1] if store.missing(store.steps[-1]) is None else store.steps[-1] - 1
    return Offline(start=starts[from_step], until=min(steps, last + 1), open=partial(RecordedSource, store))


def _nearest(store: Store, starts: dict[int, Path | None], wanted: int) -> str:
    usable = sorted((step for step in starts if store.missing(step) is None), key=lambda step: (abs(step - wanted), step))
    if not usable:
        kept = f"steps {store.steps[0]} to {store.steps[-1]} are recorded" if store.steps else "nothing is recorded"
        weights = ", ".join(str(step) for step in sorted(starts))
        return f"no other step can be either: {kept}, and there are weights for {weights}; raise record.max_gb and checkpoint.keep"
    return f"the nearest that can is {usable[0]}" + (f" (others: {', '.join(map(str, sorted(usable[1:])))})" if usable[1:] else "")
