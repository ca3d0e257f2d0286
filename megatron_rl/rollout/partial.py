"""Answers that came in parts: cut off and gone on with, or interrupted by the output of a tool. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.rollout.ingest import with_routes
from megatron_rl.rollout.routes import RouteRows, stitch
from megatron_rl.types import Candidates, Prompt, Trajectory


def request_for(before: Trajectory, given: NDArray[np.int32] | None = None) -> Prompt:
    """What to ask a server for so that it goes on behind `before` and then `given`, tokens that nobody sampled.

    Ask for routes with routed_experts_start_len = `rows_known(before)`.
    """
    parts = [before.tokens] if given is None else [before.tokens, np.asarray(given, dtype=np.int32)]
    return dataclasses.replace(before.prompt, tokens=np.concatenate(parts))


def rows_known(before: Trajectory) -> int:
    """Rows of routes that need not be sent again: all but that of the last token, which nothing was sampled from yet."""
    return 0 if before.routes is None else len(before.routes)


def continued(before: Trajectory, after: Trajectory, rows: RouteRows | None) -> Trajectory:
    """One trajectory out of an answer and what it was gone on with; the answer as it was, aborted, where that request never began.

    Args:
        after: the answer to `request_for(before, ..)`, as `ingest.answer` gives it.
        rows: its routes from `rows_known(before)` on.

    Raises:
        ValueError: the routes do not join, or only one of the two has them, or has keep-sets or candidates.
    """
    n = len(before.tokens)
    assert np.array_equal(after.tokens[:n], before.tokens), "the answer is not to request_for(before)"
    if not before.response_tokens and before.routes is None:  # the first request never began
        return with_routes(dataclasses.replace(after, prompt=before.prompt, group=before.group), rows)
    if after.finish_reason == "abort" and rows is None and not after.response_tokens:  # the second one never began: as if it was not asked
        return dataclasses.replace(before, finish_reason="abort")
    given = len(after.prompt.tokens) - n
    turn = int(before.turns.max()) + (given > 0 and before.response_tokens > 0)

    def both(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(before, name), getattr(after, name)[n:]])

    turns = np.where(after.loss_mask[n:], max(turn, 0), -1).astype(np.int32)
    plain = dataclasses.replace(
        after,
        prompt=before.prompt,
        group=before.group,
        loss_mask=both("loss_mask"),
        behaviour_logp=both("behaviour_logp"),
        versions=both("versions"),
        turns=np.concatenate([before.turns, turns]),
        text=before.text + after.text,
        candidates=_candidates(before, after),
        keep_ids=_wide(before.keep_ids, after.keep_ids, n, -1, "keep-sets"),
        kept_mass=None if before.kept_mass is None else both("kept_mass"),
    )
    if (rows is None) != (before.routes is None):
        raise ValueError("one part of an answer has routes, the other has none")
    return plain if rows is None else with_routes(plain, stitch([_rows(before), rows]))


def _rows(before: Trajectory) -> RouteRows:
    assert before.routes is not None
    valid = before.routes_valid
    return RouteRows(0, before.routes, np.ones(len(before.routes), dtype=bool) if valid is None else valid)


def _candidates(before: Trajectory, after: Trajectory) -> Candidates | None:
    one, two, n = before.candidates, after.candidates, len(before.tokens)
    ids = _wide(one.ids if one else None, two.ids if two else None, n, -1, "candidates")
    logp = _wide(one.logp if one else None, two.logp if two else None, n, -np.inf, "candidates")
    return None if ids is None or logp is None else Candidates(ids, logp)


def _wide(before: NDArray[Any] | None, after: NDArray[Any] | None, n: int, fill: float, what: str) -> NDArray[Any] | None:
    """[N, K] the rows of both, as wide as the wider."""
    if before is None or after is None:
        if before is not after:
            raise ValueError(f"one part of an answer has {what}, the other has none")
        return None
    width = max(before.shape[1], after.shape[1])
    parts = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in (before, after[n:])]
    return np.concatenate(parts)
