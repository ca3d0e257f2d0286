"""Every reply that must not reach training is refused with the request, the server and the remedy in the message."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.ingest import Expected, trajectory
from megatron_rl.rollout.routes import RouteShape
from megatron_rl.types import Prompt, Trajectory

PROMPT = Prompt("p7", np.array([10, 11, 12], dtype=np.int32), "", "")
SHAPE = RouteShape(2, (0, 1), 2, 4)
ROUTES = np.tile(np.array([[0, 1], [2, 3]]), (4, 1, 1))
"""3 prompt and 2 sampled tokens: 4 rows."""
EXPECTED = Expected(vocab_size=50, route_shape=SHAPE, version=3, keep_aborted=False)

REPLY: dict[str, Any] = {
    "text": "hi",
    "output_ids": [20, 21],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 21},
        "prompt_tokens": 3,
        "num_retractions": 0,
        "output_token_logprobs": [[-0.5, 20, None], [-1.25, 21, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "routed_experts": base64.b64encode(ROUTES.astype("<i4").tobytes()).decode(),
    },
}


def ingest(reply: dict[str, Any], expected: Expected = EXPECTED) -> Trajectory:
    return trajectory(reply, PROMPT, "g", "g.0", "http://h:1", expected)


def test_fields() -> None:
    t = ingest(REPLY)
    assert t.tokens.tolist() == [10, 11, 12, 20, 21]
    assert t.loss_mask.tolist() == [False, False, False, True, True]
    np.testing.assert_array_equal(t.behaviour_logp, np.array([np.nan, np.nan, np.nan, -0.5, -1.25], dtype=np.float32))
    assert t.versions.tolist() == [-1, -1, -1, 3, 3]
    assert t.turns.tolist() == [-1, -1, -1, 0, 0]
    assert t.routes is not None and t.routes.dtype == np.uint8
    np.testing.assert_array_equal(t.routes, ROUTES)
    assert (t.finish_reason, t.text, t.group, t.reward) == ("stop", "hi", "g", None)


def test_versions_of_each_token() -> None:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["weight_versions"] = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    t = ingest(reply, Expected(50, None, None, keep_aborted=False))
    assert t.versions.tolist() == [-1, -1, -1, 3, 4]


@pytest.mark.parametrize("retractions", [0, 1])
def test_routes_of_mixed_versions(retractions: int) -> None:
    """After a retraction SGLang reports the experts of the new weights for tokens of the old ones: only the row that the last token was
    sampled from is of its own version. Weights updated in place leave all rows as they were."""
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["weight_versions"] = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    reply["meta_info"]["num_retractions"] = retractions
    t = ingest(reply, Expected(50, SHAPE, None, keep_aborted=False))
    if retractions:
        assert t.routes_valid is not None and t.routes_valid.tolist() == [False, False, False, True]
    else:
        assert t.routes_valid is None


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["meta_info"].update(values)


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["meta_info"].pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("routed_experts"), "--enable-return-routed-experts"),
        (_drop("num_retractions"), "no num_retractions in the reply"),
        (_set(routed_experts=base64.b64encode(ROUTES[:3].astype("<i4").tobytes()).decode()), "expected 4 rows"),
        (_drop("output_token_logprobs"), "return_logprob"),
        (_set(output_token_logprobs=[[-0.5, 20, None]]), "1 log-probs for 2 tokens"),
        (_set(output_token_logprobs=[[-0.5, 20, None], [-1.0, 22, None]]), "different tokens"),
        (_set(output_token_logprobs=[[-0.5, 20, None], [None, 21, None]]), "log-prob nan of token 1"),
        (_set(output_token_logprobs=[[0.5, 20, None], [-1.0, 21, None]]), "log-prob 0.5 of token 0"),
        (_drop("weight_versions"), "no weight_versions"),
        (_set(weight_versions=[{"version": "default", "start": 0, "end": 2}]), "--weight-version 0"),
        (_set(weight_versions=[{"version": "3", "start": 0, "end": 1}]), "do not cover 2 tokens"),
        (_set(weight_versions=[{"version": "3", "start": 1, "end": 2}]), "leave a gap"),
        (_set(weight_versions=[{"version": "2", "start": 0, "end": 2}]), r"version \[2\], not 3; push the weights"),
        (_set(prompt_tokens=4), "counts 4 prompt tokens, 3 were sent"),
        (_set(finish_reason={"type": "abort", "message": "paused"}), "aborted it: paused"),
        (_set(finish_reason=None), "finish_reason"),
        (lambda reply: reply.update(output_ids=[20, 50]), "outside the vocabulary of 50"),
        (lambda reply: reply.update(output_ids=[]), "no token was sampled"),
    ],
)
def test_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    reply = copy.deepcopy(REPLY)
    change(reply)
    with pytest.raises(EngineError, match=message) as caught:
        ingest(reply)
    assert str(caught.value).startswith("http://h:1: request g.0 (prompt p7): ")


def test_abort_can_be_kept() -> None:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
    t = ingest(reply, Expected(50, SHAPE, 3, keep_aborted=True))
    assert t.finish_reason == "abort" and t.response_tokens == 2


def test_an_abort_in_the_queue_says_nothing_but_that() -> None:
    """What SGLang 0.5.23 replies for a request that it had not begun."""
    meta = {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "3"}
    reply = {"text": "", "output_ids": [], "meta_info": meta}
    t = ingest(reply, Expected(50, SHAPE, 3, keep_aborted=True))
    assert (t.response_tokens, t.routes, t.finish_reason, t.tokens.tolist()) == (0, None, "abort", [10, 11, 12])
    with pytest.raises(EngineError, match="the server aborted it: Abort in waiting queue"):
        ingest(reply)
