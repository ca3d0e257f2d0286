"""Routes of answers that a real fp32 server gave in parts: every row is that of one request over the same tokens."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_rl.rollout.client import EngineClient, EngineError
from megatron_rl.rollout.collector import Sampling, collect, resume
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.rollout.routes import RouteRows, decode_routes, stitch
from megatron_rl.types import Trajectory
from tests.engine.test_rollout import make_prompts

pytestmark = pytest.mark.engine

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
LONG = Sampling(temperature=1.0, max_new_tokens=400)
"""Seconds of decoding, so that a pause finds it unfinished."""


def ask(fleet: Fleet, tokens: list[int], new: int, start: int) -> tuple[list[int], RouteRows, int]:
    """(tokens with the greedy answer, its routes from `start` on, how many of the tokens were in the prefix cache)."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True},
        "return_routed_experts": True,
        "routed_experts_start_len": start,
    }

    async def send(client: EngineClient) -> list[dict[str, Any]]:
        return await client.generate(body, timeout=60, what="a part")

    (reply,) = fleet.run(send, fleet.engines[0].client)
    whole = tokens + reply["output_ids"]
    assert fleet.route_shape is not None
    ids = decode_routes(reply["meta_info"]["routed_experts"], len(whole) - 1 - start, fleet.route_shape)
    ids = np.sort(ids, axis=-1)  # as a trajectory has them; which of two equal scores comes first depends on the kernel
    return whole, RouteRows(start, ids, np.ones(len(ids), dtype=bool)), int(reply["meta_info"]["cached_tokens"])


def in_one_request(fleet: Fleet, tokens: NDArray[np.int32]) -> NDArray[np.integer]:
    """[N - 1, L, K] the routes of given tokens, computed anew."""
    fleet.command("/flush_cache?timeout=5", [{}], timeout=20).result()
    whole, rows, cached = ask(fleet, tokens.tolist(), 1, 0)
    assert cached == 0
    return rows.routes[: len(whole) - 2]


def test_two_requests_and_a_prefix_hit_give_the_routes_of_one(engine: Fleet) -> None:
    """The second goes on behind the first and asks for new rows only; all but its last token come out of the prefix cache."""
    prompt = make_prompts(1, seed=41)[0].tokens.tolist()
    engine.command("/flush_cache?timeout=5", [{}], timeout=20).result()
    first, rows, cached = ask(engine, prompt, 6, 0)
    assert cached == 0
    whole, more, cached = ask(engine, first, 5, len(first) - 1)
    assert cached == len(first) - 1
    assert len(more.routes) == len(whole) - len(first)
    stitched = stitch([rows, more])
    assert len(stitched.routes) == len(whole) - 1
    np.testing.assert_array_equal(stitched.routes, in_one_request(engine, np.array(whole, np.int32)))
    assert len(np.unique(stitched.routes.reshape(len(stitched.routes), -1), axis=0)) > 5  # the rows tell positions apart


def test_a_start_behind_the_prompt_is_refused(engine: Fleet) -> None:
    with pytest.raises(EngineError, match="routed_experts_start_len"):
        ask(engine, [5, 6, 7], 1, 4)


def interrupted(engine: Fleet, count: int, sampling: Sampling = LONG, resume_aborted: int = 0, times: int = 1) -> list[Trajectory]:
    """Answers that a pause in mode abort cut off, or so many; without resuming, they are returned as they are."""
    keep = resume_aborted == 0
    with Fleet.connect(engine.urls, engine.config, engine.model, routes=True) as fleet, ThreadPoolExecutor(1) as thread:
        prompts = make_prompts(count, seed=42)
        answers = thread.submit(
            collect,
            fleet,
            prompts,
            samples=1,
            sampling=sampling,
            routes=True,
            version=0,
            keep_aborted=keep,
            resume_aborted=resume_aborted,
        )
        for needed in [count] + [1] * (times - 1):  # some may be over before the next pause
            while fleet.engines[0].in_flight < needed and not answers.done():
                time.sleep(0.02)
            time.sleep(0.4)
            engine.command("/pause_generation", [{"mode": "abort"}], timeout=20).result()
            engine.command("/continue_generation", [{}], timeout=20).result()
        return answers.result(60)


def test_what_was_cut_off_is_gone_on_with(engine: Fleet) -> None:
    """Tokens, log-probs and routes of before stay; those of both parts are what one pass over all tokens gives."""
    cut = [t for t in interrupted(engine, 3) if t.finish_reason == "abort"]
    assert cut
    for t in cut:
        if not t.response_tokens:
            continue  # it may still have waited in the queue, of which the server says nothing
        assert t.routes is not None and t.routes_valid is None
        np.testing.assert_array_equal(t.routes, in_one_request(engine, t.tokens))
    more = Sampling(temperature=1.0, max_new_tokens=max(t.response_tokens for t in cut) + 8)
    for before, whole in zip(cut, resume(engine, cut, sampling=more, routes=True, version=0), strict=True):
        n = len(before.tokens)
        assert whole.prompt is before.prompt
        assert whole.finish_reason == "stop" or whole.response_tokens == more.max_new_tokens
        np.testing.assert_array_equal(whole.tokens[:n], before.tokens)
        np.testing.assert_array_equal(whole.behaviour_logp[:n], before.behaviour_logp)
        assert whole.routes_valid is None
        assert len(whole.tokens) > n and set(whole.turns[whole.loss_mask].tolist()) == {0}
        np.testing.assert_array_equal(whole.routes, in_one_request(engine, whole.tokens))  # type: ignore[arg-type]


def test_collecting_goes_on_with_what_was_cut_off(engine: Fleet) -> None:
    """As training collects: a pause in mode abort while all answers run leaves no trace in them but a line in the log."""
    want = Sampling(temperature=1.0, max_new_tokens=60)
    answers = interrupted(engine, 3, want, resume_aborted=3)
    assert len(answers) == 3
    for t in answers:
        assert t.finish_reason == "stop" or (t.finish_reason == "length" and t.response_tokens == want.max_new_tokens)
        assert t.routes_valid is None and set(t.turns[t.loss_mask].tolist()) == {0}
        np.testing.assert_array_equal(t.routes, in_one_request(engine, t.tokens))  # type: ignore[arg-type]


def test_an_answer_that_is_cut_off_again_and_again_ends_the_collection(engine: Fleet) -> None:
    with pytest.raises(EngineError, match="the server aborted it"):
        interrupted(engine, 6, LONG, resume_aborted=1, times=2)


def sampled_across_an_update(engine: Fleet, mode: str, count: int = 6) -> list[Trajectory]:
    """Answers during which servers paused in `mode` and went on as version 1 (of the same weights); version 0 is put back.

    A random model ends an answer at one token in 512, so some are over before the pause.
    """
    with Fleet.connect(engine.urls, engine.config, engine.model, routes=True) as fleet, ThreadPoolExecutor(1) as thread:
        answers = thread.submit(collect, fleet, make_prompts(count, seed=43), samples=1, sampling=LONG, routes=True, version=None)
        while fleet.engines[0].in_flight < count and not answers.done():
            time.sleep(0.02)
        time.sleep(0.4)
        try:
            engine.command("/pause_generation", [{"mode": mode}], timeout=20).result()
            engine.command("/update_weight_version", [{"new_version": "1", "abort_all_requests": False}], timeout=20).result()
            engine.command("/continue_generation", [{}], timeout=20).result()
            return answers.result(60)
        finally:
            engine.command("/update_weight_version", [{"new_version": "0", "abort_all_requests": True}], timeout=20).result()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_rows_of_another_version_than_their_token_are_marked(engine: Fleet, mode: str) -> None:
    """After a retraction all rows come from the version it went on with; an update in place leaves rows as they were."""
    across = [t for t in sampled_across_an_update(engine, mode) if set(t.versions[t.loss_mask].tolist()) == {0, 1}]
    assert across, "the update fell into no answer"
    for t in across:
        if mode == "in_place":
            assert t.routes_valid is None
        else:
            assert t.routes_valid is not None
            np.testing.assert_array_equal(t.routes_valid, t.versions[1:] == 1)
