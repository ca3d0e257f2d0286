"""Sampling from a real server: what comes back, and what is refused before or after the request."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import ModelConfig
from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import CONTEXT_MARGIN, Fleet
from megatron_rl.types import Prompt
from tests.conftest import CONTEXT
from tests.engine.oracle import Oracle

pytestmark = pytest.mark.engine

SAMPLING = Sampling(temperature=1.0, max_new_tokens=12)


def make_prompts(count: int, length: int = 10, seed: int = 0) -> list[Prompt]:
    tokens = np.random.default_rng(seed).integers(3, 250, (count, length)).astype(np.int32)
    return [Prompt(f"p{i}", row, "", "") for i, row in enumerate(tokens)]


def altered(model: Path, target: Path, **changes: object) -> ModelConfig:
    """The checkpoint folder with another config.json: what a trainer that holds another model would check against."""
    target.mkdir()
    shutil.copy(model / "config.json", target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return ModelConfig(path=str(target))


def test_trajectories_agree_with_transformers(engine: Fleet, tiny_moe: Path) -> None:
    """fp32 on both sides: log-probs within 1e-4 (4e-6 is usual; the wrong token or temperature costs 1e-1), experts identical."""
    prompts = make_prompts(3)
    found = collect(engine, prompts, samples=4, sampling=SAMPLING, routes=True, version=0)
    assert [t.prompt.id for t in found] == ["p0"] * 4 + ["p1"] * 4 + ["p2"] * 4
    assert [len({t.group for t in found[i : i + 4]}) for i in (0, 4, 8)] == [1, 1, 1]
    assert len({t.group for t in found}) == 3
    assert len({t.tokens.tobytes() for t in found}) == 12, "samples of one prompt must differ"
    oracle = Oracle(tiny_moe)
    for t in found:
        assert t.tokens[:10].tolist() == t.prompt.tokens.tolist()
        assert t.versions[t.loss_mask].tolist() == [0] * t.response_tokens
        np.testing.assert_allclose(t.behaviour_logp, oracle.log_probs(t), atol=1e-4, rtol=0)
        assert t.routes is not None
        np.testing.assert_array_equal(np.sort(t.routes, axis=-1), oracle.routes(t))


def test_one_sample_a_request_as_through_a_router(engine: Fleet) -> None:
    """A router takes single requests only. Greedy answers do not depend on how they were asked for."""
    prompts, greedy = make_prompts(4, seed=1), Sampling(temperature=0.0, max_new_tokens=8)
    together = collect(engine, prompts, samples=2, sampling=greedy, routes=True, version=0)
    model = engine.model
    with Fleet.connect(engine.urls, engine.config, model, routes=True, router=engine.urls[0]) as fleet:
        singly = collect(fleet, prompts, samples=2, sampling=greedy, routes=True, version=0)
    for a, b in zip(together, singly, strict=True):
        assert a.prompt.id == b.prompt.id
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(np.sort(a.routes, -1), np.sort(b.routes, -1))


def test_more_samples_than_slots(engine: Fleet) -> None:
    """The bound on requests in flight delays work, and loses none: one request may be out at a time."""
    narrow = replace(engine.config, max_running_requests=1)
    with Fleet.connect(engine.urls, narrow, engine.model, routes=True) as fleet:
        found = collect(fleet, make_prompts(5), samples=3, sampling=Sampling(1.0, 2), routes=True, version=0)
        assert len(found) == 15
        assert [e.in_flight for e in fleet.engines] == [0]


@pytest.mark.parametrize("bad", [-1, 512])
def test_token_outside_the_vocabulary_is_not_sent(engine: Fleet, bad: int) -> None:
    """It would end the server, so that the next request could not be answered."""
    (prompt,) = make_prompts(1)
    tokens = prompt.tokens.copy()
    tokens[3] = bad
    with pytest.raises(ValueError, match=rf"prompt p0: token {bad} is not within the vocabulary of 512; use the tokenizer"):
        collect(engine, [replace(prompt, tokens=tokens)], samples=1, sampling=SAMPLING, routes=True, version=0)
    assert engine.versions() == ("0",)


def test_too_long_prompt_names_the_request(engine: Fleet) -> None:
    (prompt,) = make_prompts(1, length=CONTEXT + 1)
    with pytest.raises(EngineError, match=rf"{engine.urls[0]}: request \w+\.0\.0 \(prompt p0\): HTTP 400: .*{CONTEXT + CONTEXT_MARGIN}"):
        collect(engine, [prompt], samples=1, sampling=SAMPLING, routes=True, version=0)


def test_other_version_is_refused(engine: Fleet) -> None:
    with pytest.raises(EngineError, match=r"sampled from weight version \[0\], not 4; push the weights first"):
        collect(engine, make_prompts(1), samples=1, sampling=SAMPLING, routes=False, version=4)


def test_slow_answer_is_an_error(engine: Fleet) -> None:
    """5 ms are too few for 400 tokens."""
    hasty = replace(engine.config, request_timeout=0.005)
    message = rf"{engine.urls[0]}: request .* no answer within 0.005 s"
    with Fleet.connect(engine.urls, hasty, engine.model, routes=True) as fleet, pytest.raises(EngineError, match=message):
        collect(fleet, make_prompts(1), samples=1, sampling=Sampling(1.0, 400), routes=True, version=0)


def test_nobody_listens(engine: Fleet) -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9: GET /\w+_info: ClientConnectorError"):
        Fleet.connect(["http://127.0.0.1:9"], engine.config, engine.model, routes=True)


def test_other_architecture(engine: Fleet, tiny_moe: Path, tmp_path: Path) -> None:
    model = altered(tiny_moe, tmp_path / "m", architectures=["MixtralForCausalLM"])
    with pytest.raises(
        ValueError, match=r"serves Qwen3MoeForCausalLM, but model.path holds MixtralForCausalLM; start it with --model-path"
    ):
        Fleet.connect(engine.urls, engine.config, model, routes=True)


def test_other_vocabulary(engine: Fleet, tiny_moe: Path, tmp_path: Path) -> None:
    model = altered(tiny_moe, tmp_path / "m", vocab_size=640)
    with pytest.raises(ValueError, match=r"its vocabulary has 512 tokens, but model.path says 640; start it with --model-path"):
        Fleet.connect(engine.urls, engine.config, model, routes=True)


def test_other_dtype(engine: Fleet) -> None:
    other = replace(engine.config, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"it computes in float32, but rollout.dtype is bfloat16; start it with --dtype bfloat16"):
        Fleet.connect(engine.urls, other, engine.model, routes=True)
