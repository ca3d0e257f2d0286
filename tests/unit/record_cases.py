"""Records made up for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.record.recorder import Recorder
from megatron_rl.record.store import About
from megatron_rl.routing.payloads import RouteKind
from megatron_rl.types import Batch, Candidates, Origin, Prompt, Trajectory

KIND = RouteKind(experts=8, layers=3, k=2, form="set")


def routes_of(tokens: int, kind: RouteKind, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    chosen = rng.random((tokens, kind.layers, kind.experts)).argsort(-1)[..., : kind.k]
    return np.sort(chosen, -1).astype(np.uint8)


def answer(step: int, place: int, *, leader: int = 0, call: int = 0, rich: bool = False) -> Trajectory:
    """An answer of a length of its own; `rich` fills every field that may be empty."""
    rng = np.random.default_rng([step, leader, call, place])
    n = 5 + (7 * place + 3 * step) % 11
    mask = np.arange(n) >= 3
    logp = np.where(mask, -rng.exponential(size=n), np.nan).astype(np.float32)
    tokens = rng.integers(0, 512, n).astype(np.int32)
    prompt = Prompt(f"train:{place}", tokens[:3], "1 + 1 =\n", "2", {"terms": [1, 1]})
    extra: dict[str, Any] = {}
    if rich:
        ids = np.where(mask[:, None], rng.integers(0, 512, (n, 4)), -1).astype(np.int32)
        extra["candidates"] = Candidates(ids, np.where(mask[:, None], -1.5, -np.inf).astype(np.float32))
        extra["keep_ids"] = ids[:, :2].copy()
        extra["kept_mass"] = np.where(mask, 0.75, np.nan).astype(np.float32)
        extra["routes_valid"] = rng.random(n - 1) < 0.5
    versions = np.where(mask, step, -1).astype(np.int32)
    turns = np.where(mask, 0, -1).astype(np.int32)
    origin, routes = Origin(step, leader, call, place), routes_of(n - 1, KIND, rng)
    return Trajectory(
        prompt, "g0", tokens, mask, logp, versions, turns, routes, "stop", " \N{SNOWMAN}2\n", reward=0.5, origin=origin, **extra
    )


def spread(answers: Sequence[Trajectory]) -> Batch:
    """Answers to train on, with advantages that differ by answer."""
    return Batch(tuple(answers), tuple(np.where(t.loss_mask, i + 1.25, 0).astype(np.float32) for i, t in enumerate(answers)))


def about(root: Path, leaders: int = 1) -> None:
    About({"train": {"seed": 7}}, leaders, leaders, {}).save(root)


def record(root: Path, steps: int, answers: int = 4, *, limit: int = 2**30, first: int = 0, leader: int = 0, rich: bool = False) -> None:
    """Steps of one request each."""
    recorder = Recorder(root, leader, limit=limit, kind=KIND, first_step=first)
    for step in range(first, steps):
        sampled = [answer(step, place, leader=leader, rich=rich) for place in range(answers)]
        recorder.sampled(sampled, "train")
        recorder.batch(step, spread(sampled))
        recorder.scored(step, spread(sampled), old=[t.behaviour_logp + np.float32(0.5) for t in sampled])
    recorder.close()


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Recursively, to the last bit; NaN equals NaN."""
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray), where
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), where
    else:
        assert a == b, where


def three_steps(root: Path) -> Path:
    """A record of three steps of four answers each, with everything that answers may have."""
    about(root)
    record(root, 3, rich=True)
    return root
