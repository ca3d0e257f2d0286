"""Prompts in, trajectories out: spreads requests over the fleet and checks every reply before anything is trained on it.

A trajectory is the prompt's ids followed by the ids the server sampled; text is never tokenised again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.rollout.client import EngineClient, EngineError, EngineUnreachable
from megatron_rl.rollout.fleet import Engine, Fleet
from megatron_rl.rollout.ingest import Expected, answer, trajectory
from megatron_rl.rollout.partial import continued, request_for, rows_known
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Prompt, Trajectory

__all__ = ["Sampling", "collect", "resume"]
logger = logging.getLogger(__name__)

OVERSUBSCRIPTION = 2
"""Samples asked of a server at once, as a multiple of those it can run: its queue must never be empty while work is left."""


def collect(
    fleet: Fleet,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
    routes: bool,
    version: int | None,
    keep_aborted: bool = False,
    resume_aborted: int = 0,
) -> list[Trajectory]:
    """Samples `samples` answers to each prompt.

    Args:
        routes: whether each trajectory carries the experts of its tokens.
        version: the weight version every token must come from; None takes any, which are then told apart by `Trajectory.versions`.
        keep_aborted: whether an answer the server cut off is returned (finish_reason "abort") or an error.
        resume_aborted: how often it is gone on with (`resume`) before it is either.

    Returns:
        len(prompts) * samples trajectories, the samples of a prompt next to each other, in the order of `prompts`.

    Raises:
        ValueError: a prompt has a token outside the vocabulary (which would end the server) or is empty.
        EngineError: a server failed, or a reply lacks something or contradicts itself.
    """
    for prompt in prompts:
        _check_tokens(prompt, fleet.facts.vocab_size)
    expected = _expected(fleet, sampling, routes, version, keep_aborted)
    return list(fleet.run(_Collection(fleet, samples, sampling, expected, resume_aborted).gather, prompts))


def resume(
    fleet: Fleet, cut: Sequence[Trajectory], *, sampling: Sampling, routes: bool, version: int | None, keep_aborted: bool = False
) -> list[Trajectory]:
    """Goes on with answers that a server cut off (finish_reason "abort"), up to `sampling.max_new_tokens` in all.

    What a server sampled before stays as it is, with its log-probs, versions and routes; only the routes of new rows are sent.

    Args:
        version: of the new tokens; None takes any.

    Raises:
        EngineError: as `collect`.
    """
    assert all(t.finish_reason == "abort" and t.response_tokens < sampling.max_new_tokens for t in cut), "nothing is left to sample"
    expected = _expected(fleet, sampling, routes, version, keep_aborted)
    return list(fleet.run(_Collection(fleet, 1, sampling, expected).resume, cut))


def _expected(fleet: Fleet, sampling: Sampling, routes: bool, version: int | None, keep_aborted: bool) -> Expected:
    fleet.require_usable()
    if routes:
        assert fleet.route_shape is not None and fleet.routes, "the fleet was not opened with routes=True"
    return Expected(fleet.facts.vocab_size, fleet.route_shape if routes else None, version, keep_aborted, sampling)


def _check_tokens(prompt: Prompt, vocab_size: int) -> None:
    tokens = np.asarray(prompt.tokens)
    if tokens.size == 0:
        raise ValueError(f"prompt {prompt.id}: has no tokens; drop it from the data")
    bad = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if bad.size:
        raise ValueError(
            f"prompt {prompt.id}: token {bad[0]} is not within the vocabulary of {vocab_size}; "
            "use the tokenizer of model.path (an id out of range would end the server)"
        )


class _Collection:
    """One call of `collect` or `resume`."""

    def __init__(self, fleet: Fleet, samples: int, sampling: Sampling, expected: Expected, resumes: int = 0) -> None:
        self.fleet = fleet
        self.samples = samples
        self.sampling = sampling
        self.expected = expected
        self.resumes = resumes
        # A server that is asked for all samples at once computes the prompt once (14 tokens: 15 % of its time, more for longer ones).
        # A router takes single samples only; and that one computation samples nothing, which SGLang 0.5.23 then calls a keep-set it lost.
        self.per_request = 1 if fleet.router or sampling.truncates else samples
        self.nonce = uuid.uuid4().hex[:8]
        bound = OVERSUBSCRIPTION * fleet.config.max_running_requests * len(fleet.engines)
        self.slots = asyncio.Semaphore(max(1, bound // self.per_request))

    async def gather(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        return await self._all(
            self._request(prompt, f"{self.nonce}.{index}", first)
            for index, prompt in enumerate(prompts)
            for first in range(0, self.samples, self.per_request)
        )

    async def resume(self, cut: Sequence[Trajectory]) -> list[Trajectory]:
        return await self._all(self._continue(before, f"{self.nonce}.{index}") for index, before in enumerate(cut))

    async def _all(self, work: Iterable[Coroutine[Any, Any, list[Trajectory]]]) -> list[Trajectory]:
        tasks = [asyncio.create_task(one) for one in work]
        watch = asyncio.create_task(self._watch())
        try:
            answers = asyncio.gather(*tasks)
            either: set[asyncio.Future[Any]] = {answers, watch}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            return [one for answer in await answers for one in answer]
        except EngineUnreachable as error:
            raise await self.fleet.explain(error) from error
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Raises when a launched server ends: its open connections may never say so."""
        while True:
            reason = self.fleet.poll_dead()
            if reason is not None:
                raise EngineError(reason)
            await asyncio.sleep(0.25)

    async def _request(self, prompt: Prompt, group: str, first: int) -> list[Trajectory]:
        count = min(self.per_request, self.samples - first)
        replies, url = await self._ask(prompt, f"{group}.{first}", self.sampling, count)
        expected = self._tolerant(self.resumes)
        answers = [trajectory(reply, prompt, group, f"{group}.{first + k}", url, expected) for k, reply in enumerate(replies)]
        return await asyncio.gather(*(self._finished(one, f"{group}.{first + k}") for k, one in enumerate(answers)))

    def _tolerant(self, resumes: int) -> Expected:
        """What is expected where a cut-off answer can still be gone on with so many times."""
        return replace(self.expected, keep_aborted=self.expected.keep_aborted or resumes > 0)

    async def _finished(self, one: Trajectory, rid: str) -> Trajectory:
        for number in range(self.resumes):
            if one.finish_reason != "abort":
                break
            if one.response_tokens >= self.sampling.max_new_tokens:
                return replace(one, finish_reason="length")  # cut off where it would have ended anyway
            logger.warning("request %s was cut off after %d tokens; it goes on from there", rid, one.response_tokens)
            (one,) = await self._continue(one, f"{rid}.r{number}", self._tolerant(self.resumes - 1 - number))
        return one

    async def _continue(self, before: Trajectory, rid: str, expected: Expected | None = None) -> list[Trajectory]:
        prompt, start = request_for(before), rows_known(before)
        left = replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - before.response_tokens)
        (reply,), url = await self._ask(prompt, rid, left, 1, start)
        return [continued(before, *answer(reply, prompt, before.group, rid, url, expected or self.expected, start))]

    async def _ask(self, prompt: Prompt, rid: str, sampling: Sampling, count: int, start: int = 0) -> tuple[list[dict[str, Any]], str]:
        """(`count` answers, the URL they came from). `start`: the first row of routes that is asked for."""
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": [int(token) for token in prompt.tokens],
        } | sampling.request(self.expected.vocab_size)
        body["sampling_params"]["n"] = count
        if self.expected.route_shape is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": start}
        what = f"request {rid} (prompt {prompt.id})"
        async with self.slots:
            engine = min(self.fleet.engines, key=lambda engine: engine.in_flight)
            client = self.fleet.router or engine.client
            replies = await self._send(engine, client, body, count, what)
        if len(replies) != count:
            raise EngineError(f"{client.url}: {what}: {len(replies)} answers to {count} samples")
        return replies, client.url

    async def _send(self, engine: Engine, client: EngineClient, body: dict[str, Any], count: int, what: str) -> list[dict[str, Any]]:
        engine.in_flight += count
        try:
            return await client.generate(body, timeout=self.fleet.config.request_timeout, what=what)
        finally:
            engine.in_flight -= count
