"""Recording while a run trains: leaders hand over what they sampled and what was made of it, and a thread writes it.

The caller pays for a few references. Encoding and writing happen behind its back, at most `AHEAD` hand-overs behind; then it waits, so
that what is not yet on disk stays small.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_rl.record.files import LeaderFiles, leader_folder
from megatron_rl.record.schema import NOWHERE, Answer, Purpose, Score, answer_rows, score_rows
from megatron_rl.record.segment import Row
from megatron_rl.routing.payloads import RouteKind, encode_each
from megatron_rl.types import Batch, Origin, Trajectory

AHEAD = 4
"""Hand-overs that may wait to be written."""
PREFIX_BYTES = 8
"""Before an IPC message: a continuation mark and the length of its metadata."""
Job = Callable[[], None]
Arrays = Sequence[NDArray[np.float32]]


class Recorder:
    """One leader's record. Trajectories must carry their origin, and arrays handed over must not change afterwards.

    Args:
        root: folder of the whole record.
        leader: data-parallel rank.
        limit: bytes this leader may keep.
        kind: of the routes; None keeps none.
        first_step: see `LeaderFiles`.
    """

    def __init__(self, root: Path, leader: int, *, limit: int, kind: RouteKind | None, first_step: int = 0) -> None:
        self._files = LeaderFiles(leader_folder(root, leader), limit, kind, first_step)
        self._kind = kind
        self._held: list[Answer] = []
        self._jobs: queue.Queue[Job | None] = queue.Queue(AHEAD)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def sampled(self, answers: Sequence[Trajectory], purpose: Purpose) -> None:
        """The answers to one request, judged. Those to train on wait until `batch` says what became of them."""
        rows = [Answer(_origin(t).step, purpose, len(answers), t) for t in answers]
        if purpose == "train":
            self._held += rows
        else:
            self._submit(lambda: self._write_answers(rows))

    def batch(self, step: int, batch: Batch) -> None:
        """What the leader trains on in this step, advantages taken; everything sampled since the last call is written."""
        held, self._held = self._held, []
        self._submit(lambda: self._write_answers(_joined(step, held, batch)))

    def scored(
        self, step: int, batch: Batch, *, old: Sequence[NDArray[np.float32]] = (), flips: Sequence[NDArray[np.float32]] = ()
    ) -> None:
        """What the trainer said of the trajectories of `batch`: [N] each, one or both."""
        pairs = enumerate(batch.trajectories)
        rows = [Score(step, _origin(t), old[i] if len(old) else None, flips[i] if len(flips) else None) for i, t in pairs]
        self._submit(lambda: self._write_scores(rows))

    def wait(self) -> None:
        """Returns when everything handed over is on disk.

        Raises:
            RuntimeError: it could not be written.
        """
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Writes what is left, that of an unfinished step included, and ends the thread.

        Raises:
            RuntimeError: as `wait`.
        """
        if not self._thread.is_alive():
            return
        held, self._held = self._held, []
        self._jobs.put(lambda: self._write_answers(held))
        self._jobs.put(None)
        self._thread.join()
        self._files.close()
        self._raise()

    # -- the thread ----------------------------------------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        self._raise()
        self._jobs.put(job)

    def _raise(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"record: cannot be written: {self._failure}; make room, or set record.enabled to false") from self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    job()
            except Exception as failure:  # noqa: BLE001  told to the caller at its next call
                self._failure = failure
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _write_answers(self, answers: Sequence[Answer]) -> None:
        if not answers:
            return
        payloads = [b""] * len(answers)
        if self._kind is not None:
            routed = [i for i, a in enumerate(answers) if a.trajectory.routes is not None]
            encoded = encode_each([cast(Any, answers[i].trajectory.routes) for i in routed], self._kind)
            for i, payload in zip(routed, encoded, strict=True):
                payloads[i] = payload
        messages = _messages(answer_rows(answers, routes=self._kind is not None))
        self._files.append("answers", [Row(a.step, m, p) for a, m, p in zip(answers, messages, payloads, strict=True)])

    def _write_scores(self, scores: Sequence[Score]) -> None:
        if scores:
            self._files.append("scores", [Row(s.step, m) for s, m in zip(scores, _messages(score_rows(scores)), strict=True)])


def _messages(table: pa.RecordBatch) -> list[memoryview]:
    """Each row as an Arrow IPC message of its own; one call for all of them takes half the time of one a row."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(pa.Table.from_batches([table]), max_chunksize=1)
    data = sink.getvalue()
    whole, reader, ends = memoryview(data), pa.ipc.MessageReader.open_stream(data), [0]
    for _ in range(1 + table.num_rows):  # the first is the schema, which has no body
        message = reader.read_next_message()
        ends.append(ends[-1] + PREFIX_BYTES + message.metadata.size + (message.body.size if message.body is not None else 0))
    return [whole[start:end] for start, end in pairwise(ends[1:])]


def _origin(trajectory: Trajectory) -> Origin:
    return trajectory.origin or NOWHERE


def _joined(step: int, held: Sequence[Answer], batch: Batch) -> list[Answer]:
    """What was sampled, with what the step made of it; then what it trained on that was sampled earlier."""
    fresh = {answer.origin for answer in held}
    made = {_origin(t): (t, a) for t, a in zip(batch.trajectories, batch.advantages, strict=True) if _origin(t) in fresh}
    rows = []
    for answer in held:
        trained = made.get(answer.origin)
        rows.append(answer if trained is None else replace(answer, advantages=trained[1], trained_reward=trained[0].reward))
    stored = [(t, a) for t, a in zip(batch.trajectories, batch.advantages, strict=True) if _origin(t) not in fresh]
    return rows + [Answer(step, "buffer", 1, t, a, t.reward) for t, a in stored]
