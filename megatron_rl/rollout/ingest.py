"""A server's reply becomes a Trajectory, or an error that names the request and what the server needs.

Schema of SGLang 0.5.23's /generate: `output_ids`, `text`, and `meta_info` with `finish_reason`, `prompt_tokens`,
`output_token_logprobs` [[log-prob, id, null]], `weight_versions` [{version, start, end}], `num_retractions`, `routed_experts` (base64),
and what `alternatives` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from megatron_rl.rollout.alternatives import candidates, keep_sets
from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.routes import RouteRows, RouteShape, decode_routes, valid_rows
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Candidates, FinishReason, Prompt, Trajectory


@dataclass(frozen=True)
class Expected:
    """What every reply of one collection must be like."""

    vocab_size: int
    route_shape: RouteShape | None
    """None where no routes were asked for."""
    version: int | None
    """Weight version of every token; None takes any."""
    keep_aborted: bool
    sampling: Sampling = Sampling()
    """What was asked for."""


def trajectory(reply: Mapping[str, Any], prompt: Prompt, group: str, rid: str, url: str, expected: Expected) -> Trajectory:
    """The checked trajectory of one reply.

    Raises:
        EngineError: something is missing, of the wrong shape or impossible; names the request, the server and the remedy.
    """
    return with_routes(*answer(reply, prompt, group, rid, url, expected))


def with_routes(plain: Trajectory, rows: RouteRows | None) -> Trajectory:
    """`plain` with the routes of all its rows, each in ascending order.

    The sum over a row's gates depends on their order in the last bit. A record keeps sets of experts, so a row has one order everywhere.
    """
    if rows is None:
        return plain
    assert rows.start == 0
    routes = rows.routes.copy()
    routes.sort(axis=-1)
    return replace(plain, routes=routes, routes_valid=None if rows.valid.all() else rows.valid)


def answer(
    reply: Mapping[str, Any], prompt: Prompt, group: str, rid: str, url: str, expected: Expected, start: int = 0
) -> tuple[Trajectory, RouteRows | None]:
    """The checked trajectory of one reply, without routes, and the routes of its tokens from `start` on.

    An answer that was aborted before the server began has neither tokens nor routes.

    Raises:
        EngineError: as `trajectory`.
    """

    def fail(what: str) -> NoReturn:
        raise EngineError(f"{url}: request {rid} (prompt {prompt.id}): {what}")

    meta = reply["meta_info"]
    finish = meta.get("finish_reason") or {}
    reason = finish.get("type")
    if reason not in ("stop", "length", "abort"):
        fail(f"finish_reason {finish!r} is none of stop, length, abort")
    if reason == "abort" and not expected.keep_aborted:
        fail(f"the server aborted it: {finish.get('message', 'no reason given')}; nothing may pause, update or abort while a step samples")
    output = np.asarray(reply["output_ids"], dtype=np.int64)
    if reason == "abort" and not output.size and meta.get("prompt_tokens") is None:
        return _unstarted(prompt, group), None
    if output.size == 0 and reason != "abort":
        fail("no token was sampled")
    if output.size and (output.min() < 0 or output.max() >= expected.vocab_size):
        fail(f"sampled a token outside the vocabulary of {expected.vocab_size}: {output.tolist()}")
    if meta.get("prompt_tokens") != len(prompt.tokens):
        fail(f"the server counts {meta.get('prompt_tokens')} prompt tokens, {len(prompt.tokens)} were sent")

    head = len(prompt.tokens)
    tokens = np.concatenate([np.asarray(prompt.tokens, dtype=np.int32), output.astype(np.int32)])
    sampled = np.arange(len(tokens)) >= head
    versions = np.full(len(tokens), -1, dtype=np.int32)
    try:
        policy = _policy(meta, output, expected)
        versions[head:] = _versions(meta, output.size)
        if expected.version is not None and (versions[head:] != expected.version).any():
            raise ValueError(
                f"sampled from weight version {sorted(set(versions[head:].tolist()))}, not {expected.version}; push the weights first"
            )
        rows = _routes(meta, versions, start, expected.route_shape)
    except ValueError as error:
        fail(str(error))
    plain = Trajectory(
        prompt=prompt,
        group=group,
        tokens=tokens,
        loss_mask=sampled,
        behaviour_logp=_from(head, policy.logp, np.nan),
        versions=versions,
        turns=np.where(sampled, 0, -1).astype(np.int32),
        routes=None,
        finish_reason=cast(FinishReason, reason),
        text=str(reply.get("text", "")),
        candidates=policy.candidates and Candidates(_from(head, policy.candidates.ids, -1), _from(head, policy.candidates.logp, -np.inf)),
        keep_ids=None if policy.keep_ids is None else _from(head, policy.keep_ids, -1),
        kept_mass=None if policy.kept_mass is None else _from(head, policy.kept_mass, np.nan),
    )
    return plain, rows


def _unstarted(prompt: Prompt, group: str) -> Trajectory:
    """Of a request that was aborted while it waited: SGLang says nothing of it, not even the routes of its prompt."""
    n = len(prompt.tokens)
    nothing = np.full(n, -1, dtype=np.int32)
    return Trajectory(
        prompt=prompt,
        group=group,
        tokens=np.asarray(prompt.tokens, dtype=np.int32),
        loss_mask=np.zeros(n, dtype=bool),
        behaviour_logp=np.full(n, np.nan, dtype=np.float32),
        versions=nothing,
        turns=nothing,
        routes=None,
        finish_reason="abort",
        text="",
    )


@dataclass(frozen=True)
class _Policy:
    """What a reply says of the policy at its M sampled tokens; the fields of Trajectory without the prompt's rows."""

    logp: NDArray[np.float32]
    candidates: Candidates | None
    keep_ids: NDArray[np.int32] | None = None
    kept_mass: NDArray[np.float32] | None = None


def _policy(meta: Mapping[str, Any], output: NDArray[np.int64], expected: Expected) -> _Policy:
    sampling, vocab_size = expected.sampling, expected.vocab_size
    logp = _log_probs(meta, output)
    if sampling.truncates:
        kept = keep_sets(meta, output, logp, sampling, vocab_size)
        return _Policy(kept.logp, kept.candidates, kept.ids, kept.mass)
    return _Policy(logp, candidates(meta, output, logp, sampling, vocab_size) if sampling.candidates else None)


def _from(head: int, rows: NDArray[Any], fill: float) -> NDArray[Any]:
    """The rows behind `head` rows of `fill`."""
    return np.concatenate([np.full((head, *rows.shape[1:]), fill, dtype=rows.dtype), rows])


def _log_probs(meta: Mapping[str, Any], output: NDArray[np.int64]) -> NDArray[np.float32]:
    entries = meta.get("output_token_logprobs")
    if entries is None:
        raise ValueError("no output_token_logprobs in the reply; return_logprob was asked for: does a router drop it?")
    if len(entries) != output.size:
        raise ValueError(f"{len(entries)} log-probs for {output.size} tokens")
    if not entries:
        return np.empty(0, dtype=np.float32)
    ids = np.asarray([entry[1] for entry in entries], dtype=np.int64)
    if (ids != output).any():
        raise ValueError("output_token_logprobs and output_ids name different tokens")
    log_probs = np.asarray([np.nan if entry[0] is None else entry[0] for entry in entries], dtype=np.float32)
    if not np.isfinite(log_probs).all() or log_probs.max() > 1e-3:
        at = int(np.argmax(~np.isfinite(log_probs) | (log_probs > 1e-3)))
        raise ValueError(f"log-prob {log_probs[at]} of token {at} is none: the weights may hold NaN")
    return log_probs


def _versions(meta: Mapping[str, Any], count: int) -> NDArray[np.int32]:
    """[count] version of each token."""
    spans = meta.get("weight_versions")
    if spans is None:
        raise ValueError("no weight_versions in the reply; SGLang 0.5.23 sends them: is the server older, or does a router drop them?")
    versions = np.empty(count, dtype=np.int32)
    at = 0
    for span in spans:
        if span["start"] != at or span["end"] < at:
            raise ValueError(f"weight_versions {spans} leave a gap")
        try:
            versions[at : span["end"]] = int(span["version"])
        except ValueError:
            raise ValueError(
                f"weight version {span['version']!r} is no number; start the server with --weight-version 0, or push weights first"
            ) from None
        at = int(span["end"])
    if at != count:
        raise ValueError(f"weight_versions {spans} do not cover {count} tokens")
    return versions


def _routes(meta: Mapping[str, Any], versions: NDArray[np.int32], start: int, shape: RouteShape | None) -> RouteRows | None:
    if shape is None:
        return None
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise ValueError(
            "no routed_experts in the reply; start the server with --enable-return-routed-experts (some routers drop the request's flag)"
        )
    retractions = meta.get("num_retractions")
    if retractions is None:
        raise ValueError(
            "no num_retractions in the reply, so it cannot be told whether its routes are those it was sampled with; SGLang 0.5.23 sends "
            "it: is the server older, or does a router drop it?"
        )
    try:
        routes = decode_routes(encoded, len(versions) - 1 - start, shape)
    except ValueError as error:
        raise ValueError(f"routed_experts: {error}") from error
    return RouteRows(start, routes, valid_rows(versions, start, int(retractions)))
