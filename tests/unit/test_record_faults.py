"""A record and what may befall it: a cut at any byte, a crash of the machine, a resumed run, a full disk, files of others."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import KIND, about, answer, assert_equal, record, spread, three_steps

from megatron_rl.record.files import SCHEMAS, leader_folder
from megatron_rl.record.recorder import Recorder
from megatron_rl.record.schema import Answer
from megatron_rl.record.segment import SUFFIXES, Segment
from megatron_rl.record.store import Store
from megatron_rl.routing.payloads import RouteKind


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_steps(tmp_path_factory.mktemp("record"))


# -- crashes -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uncut:
    """A store, what is in it, and the sizes (index, arrow, routes) of a series' files after each row."""

    root: Path
    answers: list[Answer]
    ends: dict[str, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def uncut(whole: Path) -> Uncut:
    ends = {}
    for series, schema in SCHEMAS.items():
        segment = Segment(leader_folder(whole, 0) / f"{series}_000001", schema)
        head = segment._index.nbytes - 16 * len(segment)
        columns = segment._messages.ends.tolist(), segment._payloads.ends.tolist()
        ends[series] = [(head + 16 * (i + 1), *sizes) for i, sizes in enumerate(zip(*columns, strict=True))]
    return Uncut(whole, [a for step in range(3) for a in Store(whole).answers(step)], ends)


@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_a_store_cut_at_any_byte_opens_to_the_last_whole_trajectory(uncut: Uncut, data: st.DataObject) -> None:
    """Any file of it, at any byte; the other files stay as they are."""
    series = data.draw(st.sampled_from(["answers", "scores"]))
    which = data.draw(st.integers(0, 2))
    file = leader_folder(uncut.root, 0) / f"{series}_000001{SUFFIXES[which]}"
    at = data.draw(st.integers(0, file.stat().st_size))
    expected = sum(sizes[which] <= at for sizes in uncut.ends[series])
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(uncut.root, scratch, dirs_exist_ok=True, copy_function=os.link)
        cut = leader_folder(Path(scratch), 0) / file.name
        cut.unlink()
        cut.write_bytes(file.read_bytes()[:at])
        store = Store(scratch)
        answers = [a for step in store.steps for a in store.answers(step)]
        scores = sum(len(store.scores(step)) for step in range(3))
        assert (len(answers), scores) == ((expected, 12) if series == "answers" else (12, expected))
        if answers:
            assert_equal(answers[-1], uncut.answers[len(answers) - 1])
        if len(answers) % 4:
            assert f"{len(answers) % 4} of 4 answers" in str(store.missing(len(answers) // 4))


def test_what_a_crash_of_the_machine_left_as_zeros_is_not_taken_for_rows(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = leader_folder(tmp_path, 0)
    with (folder / "answers_000001.index").open("ab") as file:
        file.write(bytes(48))
    with (folder / "answers_000001.arrow").open("rb+") as file:
        file.seek(-100, 2)
        file.write(bytes(100))
    assert len(Store(tmp_path)) == 11


def test_a_resumed_run_takes_its_later_steps_back(tmp_path: Path) -> None:
    """Killed in step 3 and gone on with from the checkpoint of step 2: steps 2 and 3 are recorded once, by the second life."""
    about(tmp_path)
    record(tmp_path, 4)
    with (leader_folder(tmp_path, 0) / "answers_000001.arrow").open("ab") as file:
        file.write(b"half a row")
    record(tmp_path, 3, answers=2, first=2)
    store = Store(tmp_path)
    assert [len(store.answers(step)) for step in range(4)] == [4, 4, 2, 0]
    assert [len(store.scores(step)) for step in range(4)] == [4, 4, 2, 0]
    with pa.OSFile(str(leader_folder(tmp_path, 0) / "answers_000001.arrow")) as stream:
        assert pa.ipc.open_stream(stream).read_all().num_rows == 8, "no half row is left in the way of other readers"


# -- bounds ------------------------------------------------------------------------------------------------------------------------


def test_the_oldest_steps_go_first_in_whole_segments(tmp_path: Path) -> None:
    about(tmp_path)
    limit = 160_000
    recorder = Recorder(tmp_path, 0, limit=limit, kind=KIND)
    sizes = []
    for step in range(40):
        sampled = [answer(step, place) for place in range(4)]
        recorder.sampled(sampled, "train")
        recorder.batch(step, spread(sampled))
        recorder.scored(step, spread(sampled), old=[t.behaviour_logp for t in sampled])
        recorder.wait()
        sizes.append(sum(f.stat().st_size for f in leader_folder(tmp_path, 0).iterdir()))
    recorder.close()
    store = Store(tmp_path)
    assert max(sizes) <= limit
    assert store.bytes == sizes[-1]
    assert min(sizes[-10:]) > limit * 3 / 4, "no more is dropped than must be"
    assert store.steps[-1] == 39
    first = store.steps[0]
    assert 10 < first < 39
    assert store.steps == list(range(first, 40)), "without a gap"
    assert all(store.missing(step) is None for step in range(first + 1, 40)), "of the first a segment may have taken a part along"
    assert "max_gb" in str(store.missing(first - 1))


# -- what is not a record ------------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record"):
        Store(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("answers_000001.index", lambda b: b"PAR1" + b[4:], "is no index of a record"),
        ("answers_000001.index", lambda b: b[:4] + b"\x02\x00" + b[6:], "version 2, and this program reads version 1"),
        ("answers_000001.index", lambda b: b[:8] + b"\xff" + b[9:], "header is damaged"),
        ("answers_000001.arrow", lambda b: b"x" * len(b), "does not begin with the columns"),
        ("answers_000001.arrow", lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:], "row 0 is damaged"),
        ("answers_000001.routes", lambda b: bytes([b[0] ^ 1]) + b[1:], "row 0 is damaged"),
    ],
)
def test_foreign_and_damaged_files_are_errors(whole: Path, tmp_path: Path, name: str, change: Any, message: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = leader_folder(tmp_path, 0) / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        Store(tmp_path).answers(0)


def test_a_missing_file_is_an_error(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (leader_folder(tmp_path, 0) / "answers_000001.routes").unlink()
    with pytest.raises(ValueError, match=r"answers_000001\.routes: is missing"):
        Store(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"version": 2}), json.dumps({"version": 1, "config": {}})])
def test_a_damaged_description_is_an_error(whole: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "about.json").write_text(text)
    with pytest.raises(ValueError, match=r"about\.json: cannot be read"):
        Store(tmp_path)


def test_what_cannot_be_written_is_told_at_the_next_call(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, limit=2**30, kind=RouteKind(8, 4, 2, "set"))
    recorder.sampled([answer(0, 0)], "decide")  # 3 layers where the run has 4
    with pytest.raises(RuntimeError, match=r"record: cannot be written: .*3, 2.*4 layers"):
        recorder.wait()
    with pytest.raises(RuntimeError, match="record"):
        recorder.close()
