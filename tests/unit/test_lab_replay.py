"""`lab replay` without a model: which answers a leader gets, and what is said where a step cannot be replayed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.actor.checkpoint import STATE, TrainState
from megatron_rl.cli import main
from megatron_rl.config import Config, DataConfig
from megatron_rl.lab.replay import RecordedSource, plan
from megatron_rl.record.files import LeaderFiles, leader_folder
from megatron_rl.record.recorder import Recorder
from megatron_rl.record.schema import Purpose
from megatron_rl.record.store import FOLDER, About, Store
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.source import Origins, Request
from megatron_rl.types import Batch, Origin, Prompt, Trajectory


def answer(origin: Origin) -> Trajectory:
    """Its text tells where it comes from; its group is named after leader, request and pair of places."""
    mask = np.array([False, True])
    where = np.where(mask, 0, -1).astype(np.int32)
    prompt = Prompt("p", np.array([0], np.int32), "", "")
    group = f"{origin.leader}.{origin.call}.{origin.place // 2}"
    logp = np.array([np.nan, -1.0], np.float32)
    text = f"{origin.leader} {origin.call} {origin.place}"
    return Trajectory(prompt, group, np.array([0, 1], np.int32), mask, logp, where, where, None, "stop", text, reward=1.0, origin=origin)


def record(run: Path, steps: range, *, leaders: int = 2, answers: int = 4) -> None:
    """Each step: two requests to train on and one to decide by, of each leader; then a stored answer trained on again."""
    About(dataclasses.asdict(Config(data=DataConfig(size=7))), leaders, leaders, {}).save(run / FOLDER)
    for leader in range(leaders):
        recorder = Recorder(run / FOLDER, leader, limit=2**30, kind=None)
        for step in steps:
            for call in (0, 1):
                recorder.sampled([answer(Origin(step, leader, call, i)) for i in range(answers)], "train")
            recorder.batch(step, Batch.without_advantages([answer(Origin(99, 0, 0, 0))]))
            recorder.sampled([answer(Origin(step, leader, 2, 0))], "decide")
        recorder.close()


def request(step: int, purpose: Purpose = "train") -> Request:
    """As a training loop makes it."""
    return Request(step, (), 4, Sampling(), 0, False, purpose)


def ask(source: RecordedSource, step: int, purpose: Purpose = "train") -> list[tuple[int, ...]]:
    """(leader, call, place) that the answers were recorded with."""
    return [tuple(int(part) for part in t.text.split()) for t in source.answer(request(step, purpose))]


def checkpoint(run: Path, step: int) -> None:
    folder = run / f"checkpoints/step_{step:06d}"
    folder.mkdir(parents=True)
    state = TrainState(step, step, step, 0, "M", 1, True)
    (folder / STATE).write_text(json.dumps(dataclasses.asdict(state)))


def test_each_leader_gets_its_own_in_order(tmp_path: Path) -> None:
    record(tmp_path, range(2))
    source = RecordedSource(Store(tmp_path / FOLDER), 1, 2)
    assert ask(source, 0) == [(1, 0, i) for i in range(4)]
    assert ask(source, 0, "decide") == [(1, 2, 0)], "requests are counted by what they are for"
    assert ask(source, 0) == [(1, 1, i) for i in range(4)]
    assert ask(source, 1) == [(1, 0, i) for i in range(4)]
    assert source.judge([answer(Origin(0, 0, 0, 0))])[0].reward == 1.0


@pytest.mark.parametrize("leaders", [1, 3])
def test_other_numbers_of_leaders_share_the_groups(tmp_path: Path, leaders: int) -> None:
    record(tmp_path, range(1))
    shares = [ask(RecordedSource(Store(tmp_path / FOLDER), leader, leaders), 0) for leader in range(leaders)]
    assert sorted(x for share in shares for x in share) == [(d, 0, i) for d in (0, 1) for i in range(4)]
    for share in shares:
        assert len(share) % 2 == 0, "groups of two stay whole"
        assert all(a[0] == b[0] and a[2] // 2 == b[2] // 2 for a, b in zip(share[::2], share[1::2], strict=True))


def test_a_run_that_went_on_with_fewer_leaders(tmp_path: Path) -> None:
    """Two leaders recorded step 0, one of them step 1; the description knows of the last only."""
    record(tmp_path, range(1), leaders=2)
    LeaderFiles(leader_folder(tmp_path / FOLDER, 0), 2**30, None, 1).close()
    About({}, 1, 1, {}).save(tmp_path / FOLDER)
    source = RecordedSource(Store(tmp_path / FOLDER), 0, 1)
    assert [leader for leader, *_ in ask(source, 0)] == [0] * 4 + [1] * 4, "none of either is lost"


def test_more_requests_than_were_recorded_are_refused(tmp_path: Path) -> None:
    record(tmp_path, range(1))
    source = RecordedSource(Store(tmp_path / FOLDER), 0, 2)
    ask(source, 0)
    ask(source, 0)
    with pytest.raises(ValueError, match=r"step 0: the method asks for more answers \(purpose train\) than were recorded"):
        ask(source, 0)
    with pytest.raises(ValueError, match=r"step 1 cannot be replayed: nothing of it was recorded"):
        ask(source, 1)


def test_a_plan_starts_from_a_checkpoint_or_the_first_weights(tmp_path: Path) -> None:
    record(tmp_path, range(5))
    checkpoint(tmp_path, 3)
    assert (plan(tmp_path, 0, 9).start, plan(tmp_path, 0, 9).until) == (None, 5)
    assert plan(tmp_path, 3, 4).start == tmp_path / "checkpoints/step_000003"
    assert plan(tmp_path, 3, 4).until == 4


def test_a_last_step_that_was_cut_is_left_out(tmp_path: Path) -> None:
    record(tmp_path, range(3), leaders=1)
    arrow = tmp_path / FOLDER / "leader_00000/answers_000001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-1])
    assert plan(tmp_path, 0, 9).until == 3, "what was cut is the answer to decide by, the last request: it shows when it is asked for"
    arrow.write_bytes(arrow.read_bytes()[:-8000])
    assert plan(tmp_path, 0, 9).until == 2


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (3, r"--from_step: 3 has no checkpoint below .*; the nearest that can is 4$"),
        (0, r"--from_step: 0 cannot be replayed: nothing of it was recorded.*; the nearest that can is 4$"),
        (9, r"--from_step: 9 cannot be replayed: nothing of it was recorded.*; the nearest that can is 4$"),
    ],
)
def test_the_nearest_step_is_named(tmp_path: Path, step: int, message: str) -> None:
    record(tmp_path, range(2, 6))
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 8)
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, step, 9)


def test_where_nothing_fits_what_there_is_is_named(tmp_path: Path) -> None:
    record(tmp_path, range(2, 6))
    checkpoint(tmp_path, 8)
    with pytest.raises(ValueError, match=r"steps 2 to 5 are recorded, and there are weights for 0, 8; raise record.max_gb"):
        plan(tmp_path, 8, 9)


def test_requests_of_a_step_are_numbered_from_0() -> None:
    origins = Origins(5)
    two = [answer(Origin(0, 0, 0, 0))] * 2
    found = [origins.of_request(step, two) for step in (3, 3, 4)]
    assert [[t.origin for t in part] for part in found] == [
        [Origin(step, 5, call, i) for i in (0, 1)] for step, call in ((3, 0), (3, 1), (4, 0))
    ]


@pytest.mark.parametrize("leaders", [1, 2, 3])
def test_what_a_replay_recorded_can_be_replayed(tmp_path: Path, leaders: int) -> None:
    """By as many leaders, each of which gets again what it had."""
    record(tmp_path / "run", range(2))
    About({}, leaders, leaders, {}).save(tmp_path / "again" / FOLDER)
    sources = [RecordedSource(Store(tmp_path / "run" / FOLDER), leader, leaders) for leader in range(leaders)]
    for leader, source in enumerate(sources):
        recorder = Recorder(tmp_path / "again" / FOLDER, leader, limit=2**30, kind=None)
        for step in range(2):
            recorder.sampled(source.answer(request(step)), "train")
            recorder.batch(step, Batch.without_advantages([]))
        recorder.close()
    again = Store(tmp_path / "again" / FOLDER)
    assert [again.missing(step) for step in range(2)] == [None, None]
    for leader in range(leaders):
        first, second = (RecordedSource(Store(tmp_path / run / FOLDER), leader, leaders) for run in ("run", "again"))
        assert ask(second, 0) == ask(first, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN: is missing"),
        (["RUN", "--out", "RUN"], "is the recorded run itself"),
        (["RUN", "--objektive.name", "ppo"], "did you mean objective.name"),
        (["elsewhere"], "holds no record"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    record(tmp_path, range(1))
    assert main(["lab", "replay", *(a.replace("RUN", str(tmp_path)) for a in arguments)]) == 2
    assert message in capsys.readouterr().err
