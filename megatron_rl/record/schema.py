"""One row a trajectory: the columns of recorded answers and of recorded scores (docs/store.md), and the way from and to `Trajectory`.

Token columns are aligned as in `Trajectory`: entry n belongs to token n. Routes are no column: they stand in a blob beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_rl.types import Candidates, FinishReason, Origin, Prompt, Trajectory

VERSION = 1
"""Of the columns and of the files around them; raised with every change that an older reader would misread."""

Purpose = Literal["train", "decide", "complete", "buffer"]
"""Why a row is there. train: sampled to train on. decide: to judge a step by (mipu). complete: a completion that values a prefix
(step_advantage). buffer: trained on again, out of POPO's buffer; its origin is an earlier step."""

NOWHERE = Origin(-1, -1, -1, -1)
"""Of answers that came without an origin, out of a checkpoint that was written before there were any."""


@dataclass(frozen=True)
class Answer:
    """One answer, and what a step made of it."""

    step: int
    """The step that saw it; its origin's, unless `purpose` is buffer."""
    purpose: Purpose
    call_size: int
    """Answers that came with it, from the same request of the same leader: how a reader knows that none is missing."""
    trajectory: Trajectory
    """With the reward that the verifier gave."""
    advantages: NDArray[np.float32] | None = None
    """[N] 0 where loss_mask is False; None where it was not trained on."""
    trained_reward: float | None = None
    """The reward that advantages were taken from, penalties included; None where it was not trained on."""

    @property
    def origin(self) -> Origin:
        """Of the trajectory."""
        return self.trajectory.origin or NOWHERE


@dataclass(frozen=True)
class Score:
    """What the trainer said of one answer's tokens."""

    step: int
    origin: Origin
    old_logp: NDArray[np.float32] | None = None
    """[N] log-probs under the weights that started the step, on the routes trained with; NaN where there is no loss."""
    flips: NDArray[np.float32] | None = None
    """[N] MoE layers in which the trainer, routing live, sends the input before token n elsewhere than the engine; NaN where unknown."""

    def merged(self, other: Score | None) -> Score:
        """Both in one: what this one lacks is the other's."""
        if other is None:
            return self
        old = other.old_logp if self.old_logp is None else self.old_logp
        return replace(self, old_logp=old, flips=other.flips if self.flips is None else self.flips)


def _many(kind: pa.DataType, name: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, pa.list_(pa.field("item", kind, nullable=False)), nullable=nullable)


def _one(kind: pa.DataType, name: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


_WHERE = [_one(pa.int32(), name) for name in ("step", "origin_step", "leader", "call", "place")]

ANSWERS = pa.schema(
    [
        *_WHERE,
        _one(pa.int32(), "call_size"),
        _one(pa.string(), "purpose"),
        _one(pa.string(), "group"),
        _one(pa.string(), "finish_reason"),
        _one(pa.float64(), "reward", nullable=True),
        _one(pa.float64(), "trained_reward", nullable=True),
        _one(pa.string(), "prompt_id"),
        _one(pa.int32(), "prompt_tokens"),
        _one(pa.string(), "prompt_text"),
        _one(pa.string(), "prompt_answer"),
        _one(pa.string(), "prompt_metadata"),
        _one(pa.string(), "text"),
        _many(pa.int32(), "tokens"),
        _many(pa.bool_(), "loss_mask"),
        _many(pa.float32(), "behaviour_logp"),
        _many(pa.int32(), "versions"),
        _many(pa.int32(), "turns"),
        _many(pa.float32(), "advantages", nullable=True),
        _one(pa.bool_(), "routed"),
        _many(pa.bool_(), "routes_valid", nullable=True),
        _many(pa.int32(), "candidate_ids", nullable=True),
        _many(pa.float32(), "candidate_logp", nullable=True),
        _many(pa.int32(), "keep_ids", nullable=True),
        _many(pa.float32(), "kept_mass", nullable=True),
    ],
    metadata={"megatron_rl.answers": str(VERSION)},
)
"""`candidate_ids`, `candidate_logp` and `keep_ids` are flattened rows, one a token; `routed` says whether there are routes in the blob."""

SCORES = pa.schema(
    [*_WHERE, _many(pa.float32(), "old_logp", nullable=True), _many(pa.float32(), "flips", nullable=True)],
    metadata={"megatron_rl.scores": str(VERSION)},
)


def answer_rows(answers: Sequence[Answer], *, routes: bool) -> pa.RecordBatch:
    """One row an answer, in order.

    Args:
        routes: whether their routes are written to the blob.
    """
    ts = [a.trajectory for a in answers]
    columns: dict[str, Any] = _where(answers) | {
        "call_size": [a.call_size for a in answers],
        "purpose": [a.purpose for a in answers],
        "group": [t.group for t in ts],
        "finish_reason": [t.finish_reason for t in ts],
        "reward": [t.reward for t in ts],
        "trained_reward": [a.trained_reward for a in answers],
        "prompt_id": [t.prompt.id for t in ts],
        "prompt_tokens": [len(t.prompt.tokens) for t in ts],
        "prompt_text": [t.prompt.text for t in ts],
        "prompt_answer": [t.prompt.answer for t in ts],
        "prompt_metadata": [json.dumps(dict(t.prompt.metadata), default=str) for t in ts],
        "text": [t.text for t in ts],
        "advantages": [a.advantages for a in answers],
        "routed": [routes and t.routes is not None for t in ts],
        "candidate_ids": [t.candidates and t.candidates.ids.ravel() for t in ts],
        "candidate_logp": [t.candidates and t.candidates.logp.ravel() for t in ts],
        "keep_ids": [None if t.keep_ids is None else t.keep_ids.ravel() for t in ts],
    }
    columns |= {name: [getattr(t, name) for t in ts] for name in ("tokens", "loss_mask", "behaviour_logp", "versions", "turns")}
    columns |= {name: [getattr(t, name) for t in ts] for name in ("routes_valid", "kept_mass")}
    if not routes:
        columns["routes_valid"] = [None] * len(ts)
    return _batch(columns, ANSWERS)


def score_rows(scores: Sequence[Score]) -> pa.RecordBatch:
    """One row a score, in order."""
    columns = {"old_logp": [s.old_logp for s in scores], "flips": [s.flips for s in scores]}
    return _batch(_where(scores) | columns, SCORES)


def _where(rows: Sequence[Answer] | Sequence[Score]) -> dict[str, Any]:
    origins = [r.origin for r in rows]
    return {
        "step": [r.step for r in rows],
        "origin_step": [o.step for o in origins],
        "leader": [o.leader for o in origins],
        "call": [o.call for o in origins],
        "place": [o.place for o in origins],
    }


def _batch(columns: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [_lists(columns[f.name], f) if pa.types.is_list(f.type) else pa.array(columns[f.name], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _lists(rows: Sequence[NDArray[Any] | None], field: pa.Field) -> pa.ListArray:
    """Built from one concatenated buffer: row by row it would cost a Python object an entry."""
    missing = [row is None for row in rows]
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kind = field.type.value_type.to_pandas_dtype()
    given = [row for row in rows if row is not None]
    values = np.concatenate(given).astype(kind, copy=False) if given else np.empty(0, kind)
    mask = pa.array(missing) if any(missing) else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, field.type.value_type), type=field.type, mask=mask)


# -- back --------------------------------------------------------------------------------------------------------------------------


def read_answer(row: pa.RecordBatch, routes: NDArray[Any] | None) -> Answer:
    """The answer of a batch of one row.

    Args:
        routes: [N - 1, L, K]; None where it has none.
    """
    tokens, text = _array(row, "tokens"), _scalars(row)
    assert tokens is not None
    n = len(tokens)
    prompt = Prompt(
        text["prompt_id"],
        tokens[: text["prompt_tokens"]],
        text["prompt_text"],
        text["prompt_answer"],
        json.loads(text["prompt_metadata"]),
    )
    ids = _array(row, "candidate_ids")
    keep = _array(row, "keep_ids")
    candidates = None if ids is None else Candidates(ids.reshape(n, -1), cast(Any, _array(row, "candidate_logp")).reshape(n, -1))
    trajectory = Trajectory(
        prompt=prompt,
        group=text["group"],
        tokens=tokens,
        **{name: cast(Any, _array(row, name)) for name in ("loss_mask", "behaviour_logp", "versions", "turns")},
        routes=routes,
        finish_reason=cast(FinishReason, text["finish_reason"]),
        text=text["text"],
        reward=text["reward"],
        candidates=candidates,
        keep_ids=None if keep is None else keep.reshape(n, -1),
        kept_mass=_array(row, "kept_mass"),
        routes_valid=_array(row, "routes_valid"),
        origin=_origin(text),
    )
    return Answer(text["step"], text["purpose"], text["call_size"], trajectory, _array(row, "advantages"), text["trained_reward"])


def read_score(row: pa.RecordBatch) -> Score:
    """The score of a batch of one row."""
    text = _scalars(row)
    return Score(text["step"], _origin(text) or NOWHERE, _array(row, "old_logp"), _array(row, "flips"))


def _scalars(row: pa.RecordBatch) -> dict[str, Any]:
    return {f.name: row.column(f.name)[0].as_py() for f in row.schema if not pa.types.is_list(f.type)}


def _origin(text: dict[str, Any]) -> Origin | None:
    found = Origin(text["origin_step"], text["leader"], text["call"], text["place"])
    return None if found == NOWHERE else found


def _array(row: pa.RecordBatch, name: str) -> NDArray[Any] | None:
    cell = row.column(name)[0]
    return None if not cell.is_valid else cell.values.to_numpy(zero_copy_only=False)
