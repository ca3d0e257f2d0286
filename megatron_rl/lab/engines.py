"""The engines' side: answers sampled in every setting, and the floor of an engine against itself."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import Dtype, ModelConfig
from ..rollout.client import EngineError
from ..rollout.collector import Sampling, collect
from ..rollout.fleet import Fleet
from ..rollout.routes import decode_routes
from ..sync.control import check_versions, flush
from ..types import Prompt, Trajectory
from .config import EngineConfig, LabConfig
from .records import Statistics, otherwise
from .summary import statistics
from .versions import derive, quantisation

FLOOR_TRAJECTORIES = 32
"""How many answers an engine scores again."""
Floor = dict[str, Statistics]
Note = Callable[[str], None]


def sample(
    config: LabConfig, model: str, out: Path, prompts: Sequence[Prompt], *, routes: bool, note: Note
) -> dict[str, tuple[list[Trajectory], Floor]]:
    """Answers in every engine setting, and how far each engine is from itself on the same tokens.

    One server after another, one for each dtype; settings of one dtype share it, with their own weights loaded before.

    Args:
        routes: whether the model routes.
    """
    found: dict[str, tuple[list[Trajectory], Floor]] = {}
    for dtype in dict.fromkeys(one.dtype for one in config.settings):
        alike = [one for one in config.settings if one.dtype == dtype]
        note(f"engine {dtype}: starting")
        with _start(config, model, out, dtype, alike, routes) as fleet:
            loaded: str | None = None
            for one in sorted(alike, key=lambda e: e.quantisation or ""):
                if one.quantisation != loaded:
                    load(fleet, quantised_folder(config, model, out, one), config.rollout.request_timeout)
                    loaded = one.quantisation
                answers, floor = _measure(config, fleet, one, prompts, routes)
                note(f"engine {one.name}: {sum(t.response_tokens for t in answers)} tokens")
                found[one.name] = answers, floor
            if loaded is not None and config.rollout.urls:
                load(fleet, model, config.rollout.request_timeout)  # somebody else's server gets back what it had
    return {one.name: found[one.name] for one in config.settings}


def _start(config: LabConfig, model: str, out: Path, dtype: Dtype, alike: Sequence[EngineConfig], routes: bool) -> Fleet:
    widest = max(alike, key=lambda one: one.keep_sets)
    return Fleet.start(
        widest.over(config.rollout),
        ModelConfig(path=model, dtype=dtype),
        routes=routes,
        log_dir=out / "servers" / dtype,
        context_length=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        seed=config.seed,
    )


def quantised_folder(config: LabConfig, model: str, out: Path, engine: EngineConfig) -> str:
    """The checkpoint that an engine serves; made where it is not there yet."""
    if engine.quantisation is None:
        return model
    target = out / "weights" / engine.quantisation
    return str(derive(model, target, quantisation(engine.quantisation, config.quantiser)))


def load(fleet: Fleet, folder: str, timeout: float) -> None:
    """Weights of another checkpoint of the same architecture into every server, as version 0."""
    flush(fleet, timeout)
    body = {"model_path": str(Path(folder).absolute()), "weight_version": "0", "flush_cache": True}
    fleet.command("/update_weights_from_disk", [body] * len(fleet.urls), timeout=timeout).result()
    check_versions(fleet, 0)


def _measure(
    config: LabConfig, fleet: Fleet, engine: EngineConfig, prompts: Sequence[Prompt], routes: bool
) -> tuple[list[Trajectory], Floor]:
    rollout = engine.over(config.rollout)
    sampling = dataclasses.replace(
        Sampling.from_config(rollout, candidates=0 if rollout.truncates else min(config.grid.candidates, fleet.facts.vocab_size)),
        stop_token_ids=config.stop_token_ids,
    )
    answers = collect(fleet, prompts, samples=rollout.samples_per_prompt, sampling=sampling, routes=routes, version=0)
    # SGLang's log-probs of given tokens are of the whole distribution at temperature 1.
    plain = engine.temperature == 1 and not rollout.truncates
    return answers, engine_floor(fleet, answers[:FLOOR_TRAJECTORIES], routes=routes) if plain else {}


def engine_floor(fleet: Fleet, answers: Sequence[Trajectory], *, routes: bool) -> Floor:
    """One engine on the same tokens: all requests at once, twice, one after the other, and against what it said when it sampled."""
    together, again = (fleet.run(_score_all, fleet, answers, routes, len(answers)) for _ in range(2))
    alone = fleet.run(_score_all, fleet, answers, routes, 1)
    sampled = [(t.behaviour_logp[t.loss_mask], t.routes) for t in answers]
    return {
        "engine repeated": _compare(again, together),
        "engine, other batch": _compare(alone, together),
        "engine, prefill against decode": _compare(together, sampled),
    }


Scores = tuple[NDArray[np.float32], NDArray[Any] | None]
"""Log-probs of an answer's sampled tokens, and the routes of all its positions."""


def _compare(a: Sequence[Scores], b: Sequence[Scores]) -> Statistics:
    found = statistics(np.concatenate([x[0].astype(np.float64) - y[0] for x, y in zip(a, b, strict=True)]))
    pairs = [(x[1], y[1]) for x, y in zip(a, b, strict=True) if x[1] is not None and y[1] is not None]
    if pairs:
        differs = [otherwise(x, y).any(axis=1) for x, y in pairs]
        found["route_mismatch_share"] = float(np.concatenate(differs).mean())
    return found


async def _score_all(fleet: Fleet, answers: Sequence[Trajectory], routes: bool, at_once: int) -> list[Scores]:
    """The engine's log-probs of given tokens, from prefill, `at_once` requests in flight."""
    flying = asyncio.Semaphore(at_once)

    async def one(index: int, answer: Trajectory) -> Scores:
        async with flying:
            return await _score(fleet, index, answer, routes)

    return list(await asyncio.gather(*(one(i, t) for i, t in enumerate(answers))))


async def _score(fleet: Fleet, index: int, answer: Trajectory, routes: bool) -> Scores:
    prompt, client, what = len(answer.prompt.tokens), fleet.engines[0].client, f"scoring answer {index}"
    body: dict[str, Any] = {
        "input_ids": answer.tokens.tolist(),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": prompt - 1,
    }
    if routes:
        body |= {"return_routed_experts": True}
    (reply,) = await client.generate(body, timeout=fleet.config.request_timeout, what=what)
    entries = reply["meta_info"].get("input_token_logprobs") or []
    wanted = answer.tokens[prompt:]
    found = np.array([e[1] for e in entries[1:]], dtype=np.int64)
    # SGLang takes the last id of the vocabulary for a placeholder of images and names it 0; its log-prob is the right one.
    named = np.where(wanted == fleet.facts.vocab_size - 1, 0, wanted)
    if not np.array_equal(found, named):
        raise EngineError(
            f"{client.url}: {what}: it was asked for log-probs of tokens {wanted.tolist()} and returned those of {found.tolist()}"
        )
    logp = np.array([e[0] for e in entries[1:]], dtype=np.float32)
    if not routes:
        return logp, None
    assert fleet.route_shape is not None
    return logp, decode_routes(reply["meta_info"]["routed_experts"], len(answer.tokens), fleet.route_shape)[:-1]
