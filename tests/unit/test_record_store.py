"""The record of a run: what comes back is what was handed over, and routes take little more than their information."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import KIND, about, answer, assert_equal, record, spread, three_steps

from megatron_rl.record.files import leader_folder
from megatron_rl.record.recorder import Recorder
from megatron_rl.record.schema import Answer
from megatron_rl.record.store import Store
from megatron_rl.routing.codec import FORMS, HEADER_BYTES, Form, encode
from megatron_rl.routing.payloads import RouteKind, decode_one, encode_each


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_steps(tmp_path_factory.mktemp("record"))


# -- round trip --------------------------------------------------------------------------------------------------------------------


def test_what_comes_back_is_what_was_handed_over(whole: Path) -> None:
    store = Store(whole)
    assert store.about.config["train"]["seed"] == 7
    assert store.steps == [0, 1, 2]
    for step in store.steps:
        sampled = [answer(step, place, rich=True) for place in range(4)]
        expected = [Answer(step, "train", 4, t, a, 0.5) for t, a in zip(sampled, spread(sampled).advantages, strict=True)]
        found = store.answers(step)
        assert len(found) == 4
        for a, b in zip(expected, found, strict=True):
            assert_equal(a, b)
        scores = store.scores(step)
        for t in sampled:
            np.testing.assert_array_equal(scores[t.origin].old_logp, t.behaviour_logp + np.float32(0.5))
        assert store.missing(step) is None


def test_fields_that_a_run_does_not_have_come_back_as_none(tmp_path: Path) -> None:
    about(tmp_path)
    recorder = Recorder(tmp_path, 0, limit=2**30, kind=None)
    dense = dataclasses.replace(answer(0, 0), routes=None, reward=None)
    recorder.sampled([dense], "complete")
    recorder.close()
    (found,) = Store(tmp_path).answers(0)
    assert_equal(found, Answer(0, "complete", 1, dense))


def test_what_was_sampled_and_not_trained_on_and_what_was_trained_on_again(tmp_path: Path) -> None:
    """Dynamic sampling leaves answers out, the overlong penalty changes rewards, POPO brings older ones back."""
    about(tmp_path)
    old, used, unused = answer(2, 1), answer(5, 0), answer(5, 1)
    recorder = Recorder(tmp_path, 0, limit=2**30, kind=KIND)
    recorder.sampled([used, unused], "train")
    recorder.batch(5, spread([dataclasses.replace(used, reward=0.25), old]))
    recorder.sampled([answer(5, 0, call=1)], "decide")
    recorder.close()
    found = Store(tmp_path).answers(5)
    assert [(a.purpose, a.trained_reward, a.trajectory.reward) for a in found] == [
        ("train", 0.25, 0.5),
        ("train", None, 0.5),
        ("decide", None, 0.5),
        ("buffer", 0.5, 0.5),
    ]
    assert found[3].origin == old.origin
    assert found[3].advantages is not None
    assert found[3].advantages.max() == 2.25, "the second of the batch"
    assert found[1].advantages is None
    assert Store(tmp_path).missing(5) is None, "a buffered answer is not of this step's requests"


def test_leaders_write_apart_and_are_read_together(tmp_path: Path) -> None:
    about(tmp_path, leaders=2)
    record(tmp_path, 2, leader=0)
    assert "leaders [1]" in str(Store(tmp_path).missing(1))
    record(tmp_path, 2, leader=1)
    store = Store(tmp_path)
    assert [(a.origin.leader, a.origin.place) for a in store.answers(1)] == [(d, p) for d in (0, 1) for p in range(4)]
    assert store.missing(1) is None


def test_any_arrow_reader_takes_the_files(whole: Path) -> None:
    with pa.OSFile(str(leader_folder(whole, 0) / "answers_000001.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.num_rows == 12
    assert table.column("tokens")[5].as_py() == answer(1, 1, rich=True).tokens.tolist()


def test_an_unfinished_step_is_written_too(tmp_path: Path) -> None:
    """An error in the update must not take its batch with it."""
    about(tmp_path)
    recorder = Recorder(tmp_path, 0, limit=2**30, kind=KIND)
    recorder.sampled([answer(0, 0), answer(0, 1)], "train")
    recorder.close()
    recorder.close()
    found = Store(tmp_path).answers(0)
    assert [a.advantages for a in found] == [None, None]
    assert Store(tmp_path).missing(0) is None


# -- routes ------------------------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 30), max_size=6),
    layers=st.integers(1, 9),
    experts=st.integers(1, 300),
    k=st.integers(1, 9),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_payloads_are_those_of_the_codec(lengths: list[int], layers: int, experts: int, k: int, form: Form, seed: int) -> None:
    k = min(k, experts)
    kind, rng = RouteKind(experts, layers, k, form), np.random.default_rng(seed)
    routes = [rng.random((n, layers, experts)).argsort(-1)[..., :k] for n in lengths]
    payloads = encode_each(routes, kind)
    assert payloads == [encode(one, experts, form)[HEADER_BYTES:] for one in routes]
    for one, payload in zip(routes, payloads, strict=True):
        np.testing.assert_array_equal(decode_one(payload, len(one), kind), np.sort(one, -1) if form == "set" else one)


def test_routes_take_little_more_than_their_information(tmp_path: Path) -> None:
    """log2 C(8, 2) = 4.81 bits a token-layer; stored are 5, filled up to bytes, and 4 bytes of index an answer of 25 rows."""
    about(tmp_path)
    record(tmp_path, 1, answers=64)
    folder = leader_folder(tmp_path, 0)
    rows = sum(len(answer(0, place).routes) * KIND.layers for place in range(64))  # type: ignore[arg-type]
    blob = folder.joinpath("answers_000001.routes").stat().st_size
    exact = sum(math.ceil(len(answer(0, place).routes) * KIND.layers * 5 / 8) for place in range(64))  # type: ignore[arg-type]
    assert blob == exact
    assert blob <= 1.2 * rows * math.log2(28) / 8
