"""What every router really chose, in the forward and in each recomputation, beside the routes given for its tokens.

Every token of the batch has an id of its own and its routes follow from the id alone, so that what a row should have been given can be
told from the tokens that entered the model, without the code that cuts and keys routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.feed import Feed, hand_out
from megatron_rl.actor.parallel import Mesh
from megatron_rl.config import Config, ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_rl.convert.families import family_for
from megatron_rl.convert.hf import read_config
from megatron_rl.methods.registry import build
from megatron_rl.rollout.routes import RouteShape, route_shape
from megatron_rl.types import Batch
from tools.layouts.batch import LENGTHS, make_batch
from tools.layouts.replays import ReplayCase

EXAMPLES = 3
"""Rows routed wrongly that are told in full."""


@dataclass
class Given:
    """The routes of every token id, and the batch made of them."""

    shape: RouteShape
    routes_VLK: np.ndarray
    batch: Batch

    @classmethod
    def make(cls, shape: RouteShape, vocab: int) -> Given:
        """Ragged answers whose ids run from 1; 0 is padding's."""
        rng = np.random.default_rng(5)
        layers = len(shape.moe_layers)
        routes_VLK = rng.random((vocab, layers, shape.experts)).argsort(-1)[..., : shape.top_k].astype(np.uint8)
        whole = make_batch(vocab, layers, shape.experts, shape.top_k, lengths=(*LENGTHS, 6))
        answers, first = [], 1
        for t in whole.trajectories:
            tokens = np.arange(first, first + len(t.tokens), dtype=np.int32)
            answers.append(dataclasses.replace(t, tokens=tokens, routes=routes_VLK[tokens[:-1]]))
            first += len(tokens)
        assert first <= vocab, "every token needs an id of its own"
        return cls(shape, routes_VLK, Batch(tuple(answers), whole.advantages))

    @property
    def ids(self) -> np.ndarray:
        """Of all tokens that routers see: an answer's last one is never put in."""
        return np.concatenate([t.tokens[:-1] for t in self.batch.trajectories])


@dataclass
class Call:
    """One forward of one router."""

    hidden: Tensor
    tokens_R: Tensor
    """The tokens of its rows."""
    again: int = 0
    """Times it was recomputed."""


@dataclass
class Watch:
    """Every call of every router of this rank, against what was given."""

    given: Given
    tensor_rank: int
    tensor_size: int
    scored: Tensor
    """int [V, L] forwards of a token without gradient."""
    forward: Tensor
    recomputed: Tensor
    calls: dict[int, list[Call]] = field(default_factory=dict)
    wrong: int = 0
    rows: int = 0
    examples: list[str] = field(default_factory=list)
    _entered: Tensor | None = None
    """The tokens of the model chunk that is running forward, if one is."""

    @contextmanager
    def on(self, actor: Actor) -> Iterator[Watch]:
        """Watches while the body runs."""
        hooks = []
        for chunk in actor.chunks:
            hooks.append(chunk.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(chunk.register_forward_hook(self._leave))
            hooks += [m.register_forward_hook(self._routed) for m in chunk.modules() if type(m).__name__ == "TopKRouter"]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, chunk: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._entered = kwargs["input_ids"][0].chunk(self.tensor_size)[self.tensor_rank]

    def _leave(self, *_: Any) -> None:
        self._entered = None

    def _routed(self, router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        hidden, calls = args[0].detach().clone(), self.calls.setdefault(router.layer_number, [])
        if self._entered is None:  # no chunk runs forward: autograd computes a layer again, whose input tells which call that was
            call = next(c for c in calls if not c.again and torch.equal(c.hidden, hidden))
            call.again += 1
            self._check(router.layer_number, call, output[1], self.recomputed)
            return
        call = Call(hidden, self._entered)
        if router.training:
            calls.append(call)
        self._check(router.layer_number, call, output[1], self.forward if router.training else self.scored)

    def _check(self, layer_number: int, call: Call, map_RE: Tensor, count_VL: Tensor) -> None:
        depth = self.given.shape.moe_layers.index(layer_number - 1)
        real_R = call.tokens_R > 0
        wanted_RK = torch.from_numpy(self.given.routes_VLK[call.tokens_R.numpy(), depth].astype(np.int64))
        wanted_RE = torch.zeros_like(map_RE).scatter(1, wanted_RK, True)
        # Padding goes to k experts, whichever: nobody looks at them.
        fine_R = torch.where(real_R, (map_RE == wanted_RE).all(dim=1), map_RE.sum(dim=1) == self.given.shape.top_k)
        self.rows += fine_R.numel()
        self.wrong += int((~fine_R).sum())
        for row in torch.nonzero(~fine_R).flatten().tolist()[: EXAMPLES - len(self.examples)]:
            chosen = torch.nonzero(map_RE[row]).flatten().tolist()
            self.examples.append(f"layer {layer_number}, token {int(call.tokens_R[row])}: {chosen} for {wanted_RK[row].tolist()}")
        count_VL[call.tokens_R[real_R], depth] += 1


def put_wrong(feed: Feed, fault: str) -> Feed:
    """The feed with its routes where they do not belong."""
    routes = [b.routes_TLK for b in feed.micro_batches]
    assert all(r is not None for r in routes)
    if fault == "rows":
        moved = [r.roll(1, 0) for r in routes if r is not None]
    elif fault == "layers":
        moved = [r.roll(1, 1) for r in routes if r is not None]
    else:
        moved = [r for r in (*routes[1:], routes[0]) if r is not None]
    return dataclasses.replace(
        feed, micro_batches=[dataclasses.replace(b, routes_TLK=r) for b, r in zip(feed.micro_batches, moved, strict=True)]
    )


def open_actor(folder: Path, mesh: Mesh, case: ReplayCase) -> Actor:
    """The policy in the case's layout."""
    path = folder / case.model
    config = Config(
        model=ModelConfig(path=str(path), dtype="float32", recompute=case.recompute, logprob_chunk=16),
        parallel=ParallelConfig(**case.where.parallel),
    )
    hf = read_config(path)
    actor = Actor(config, mesh, family_for(hf), hf)
    actor.load_hf(path)
    return actor


def watched(actor: Actor, mesh: Mesh, case: ReplayCase) -> dict[str, Any]:
    """Scores with the given routes, routes live, trains with the given routes, routes live again; what was seen of all ranks."""
    shape = route_shape(actor.hf)
    assert shape is not None
    given = Given.make(shape, actor.vocab_size)
    mine = given.batch.select(range(mesh.data_rank, len(given.batch.trajectories), mesh.data_size)) if mesh.is_leader else None
    multiple = max(case.micro_batches, actor.micro_batch_multiple)
    feed = hand_out(mesh, actor.places, mine, budget=128, experts=actor.experts, max_tokens=16, multiple=multiple)
    if case.fault != "none":
        feed = put_wrong(feed, case.fault)
    size = (actor.vocab_size, len(shape.moe_layers))
    watch = Watch(given, mesh.tensor_rank, mesh.tensor_size, *(torch.zeros(size, dtype=torch.int64) for _ in range(3)))
    with watch.on(actor):
        actor.score(feed.micro_batches, "replay")
    before = actor.score(feed.micro_batches, "observe", router_scores=True)
    with watch.on(actor):
        actor.update(feed.micro_batches, build(ObjectiveConfig(), ()), feed.over, 1e-3, routing="replay")
    after = actor.score(feed.micro_batches, "observe", compare_with=before.router_scores)
    moved = all(bool((shift_T[b.real_T] > 0).all()) for b, shift_T in zip(feed.micro_batches, after.shift, strict=True))
    return told(watch, given, mesh) | {"micro_batches": len(feed.micro_batches), "moved": all(mesh.gather(moved))}


def told(watch: Watch, given: Given, mesh: Mesh) -> dict[str, Any]:
    """Over all ranks: how often each token passed each layer (which numbers occur), and which rows went wrong."""
    ids = torch.from_numpy(given.ids.astype(np.int64))

    def times(of: Callable[[Watch], Tensor]) -> list[int]:
        return sorted(set(sum(mesh.gather(of(watch)))[ids].flatten().tolist()))

    return {
        "scored": times(lambda w: w.scored),
        "forward": times(lambda w: w.forward),
        "recomputed": times(lambda w: w.recomputed),
        "wrong": sum(mesh.gather(watch.wrong)),
        "rows": sum(mesh.gather(watch.rows)),
        "examples": [one for part in mesh.gather(watch.examples) for one in part][:EXAMPLES],
    }
