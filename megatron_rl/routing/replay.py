"""Hooks on Megatron's routers: record what they choose, or make them choose what is given.

A hook stands where Megatron keeps its own `RouterReplay` (`TopKRouter.router_replay`), so no patch is needed. It is bound to the
router of a live module by that module's global layer number. Rows are keyed by (micro-batch, layer); the forward consumes each key
once. A call during a backward pass is a recompute: each layer's recomputes come in the order of its forwards, in every schedule
(no pipelining, 1F1B, interleaved), so a cursor a layer finds the key. `finish` fails on anything left over.

Rows of `layout.LIVE` cannot be replayed: there the router chooses. Gates are always computed from the trainer's own scores, so the
gradient reaches the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..types import RouterScores
from .agreement import NEVER, LayerCounts, compare, margins
from .guard import check_router_settings
from .layout import LIVE

Mode = Literal["live", "record", "replay", "observe"]
"""live: routers choose freely. record: they do, and it is kept. replay: they take the given rows. observe: they choose freely, and
each token's number of layers that differ from the given rows is counted."""

TopK = tuple[Tensor, Tensor]
Key = tuple[int, int]
"""(micro-batch, layer number)."""


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread, as it is when activations are recomputed."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Session:
    """One pass of the schedule: what routers are given, and what was seen of them."""

    mode: Mode
    rows: Mapping[Key, Tensor]
    keep_scores: bool = False
    before: Mapping[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Experts and log-scores of an earlier pass, to compare with."""
    recorded: dict[Key, Tensor] = field(default_factory=dict)
    """mode record: the live choices."""
    chosen: dict[Key, Tensor] = field(default_factory=dict)
    """keep_scores: the experts in use, and in `scores` the natural log of their normalised router scores."""
    scores: dict[Key, Tensor] = field(default_factory=dict)
    keep_margins: bool = False
    margins: dict[Key, Tensor] = field(default_factory=dict)
    """keep_margins: [rows] least log-score of the experts in use less the best of the others."""
    real_rows: Sequence[Tensor] = ()
    """Where live choices are compared with the given rows: for each micro-batch, bool [rows], False in padding."""
    differing: dict[int, Tensor] = field(default_factory=dict)
    """real_rows: micro-batch -> layers of this rank that would route each token otherwise than given; padding and rows of LIVE count
    none."""
    first: dict[int, Tensor] = field(default_factory=dict)
    """real_rows: micro-batch -> number of the shallowest of this rank's layers that would; `agreement.NEVER` where none."""
    agreement: dict[int, LayerCounts] = field(default_factory=dict)
    """real_rows: layer number -> counts over all micro-batches."""
    shift: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> sum over this rank's layers of the mean |log score now / before| over the experts of the earlier pass."""
    order: dict[int, list[int]] = field(default_factory=dict)
    """Layer -> the micro-batches its forward has seen, in order."""
    recomputed: dict[int, int] = field(default_factory=dict)
    """Layer -> how many of them were recomputed."""


class RouterHook:
    """What a router calls in place of its top-k."""

    def __init__(self, owner: RoutingReplay, router: nn.Module, layer_number: int, chunk: int) -> None:
        self._owner = owner
        self._router = router
        self.chunk = chunk
        self.layer_number = layer_number

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """Megatron's contract: (scores at the chosen experts, their ids), each [tokens, topk]."""
        assert default_compute_topk is not None
        return self._owner.choose(self, scores, topk, lambda: default_compute_topk(scores, topk, num_groups, group_topk))

    @torch.no_grad()
    def log_scores(self, scores: Tensor) -> Tensor:
        """fp32 [tokens, experts] natural log of the normalised scores, whatever form the router hands to its top-k."""
        config: Any = self._router.config
        bias = getattr(self._router, "expert_bias", None)
        if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
            return scores.float().log_softmax(dim=-1)
        plain = scores.float() if bias is None else scores.float() - bias
        return (plain / plain.sum(dim=-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny).log()


class RoutingReplay:
    """All routers of one model on this rank. A second model in the process has its own object; they share nothing.

    Args:
        chunks: the model chunks of this rank, in virtual-pipeline order.
        router_type: Megatron's `TopKRouter` (passed in, so that this module needs no Megatron).

    Raises:
        ValueError: two routers claim one layer, or a router is set in a way that replay cannot stand (`guard.RULES`).
    """

    def __init__(self, chunks: Sequence[nn.Module], router_type: type[nn.Module]) -> None:
        self._session: Session | None = None
        self._micro_batch: dict[int, int] = {}
        self._hooks: dict[int, RouterHook] = {}
        for index, chunk in enumerate(chunks):
            for router in _routers(chunk, router_type):
                number = router.layer_number
                assert isinstance(number, int), "a router without a layer number cannot be bound"
                check_router_settings(router.config)
                if number in self._hooks:
                    raise ValueError(f"two live routers claim layer {number}; replay binds one router a layer")
                hook = RouterHook(self, router, number, index)
                router.router_replay = hook  # type: ignore[assignment]
                self._hooks[number] = hook

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Global 1-based numbers of the MoE layers on this rank, ascending."""
        return tuple(sorted(self._hooks))

    @contextmanager
    def session(
        self,
        mode: Mode,
        rows: Sequence[Tensor | None] = (),
        *,
        micro_batches: int,
        keep_scores: bool = False,
        keep_margins: bool = False,
        compare_with: Sequence[RouterScores | None] = (),
        real_rows: Sequence[Tensor] = (),
    ) -> Iterator[Session]:
        """One pass of the schedule over `micro_batches`.

        Args:
            rows: for replay and observe, one [tokens, layers, K] a micro-batch, layers in the order of `layer_numbers`.
            keep_scores: keep the experts in use and their scores.
            keep_margins: keep by how much the least of them is above the best of the others.
            compare_with: one a micro-batch, kept by an earlier pass; fills `Session.shift`.
            real_rows: one bool [tokens] a micro-batch, False in padding: fills `Session.differing`, `first` and `agreement`. observe needs
                it. With replay, routers say what they would choose behind layers that take the given rows.

        Raises:
            RuntimeError: at the end, if a row was left over or is missing; names micro-batch and layer.
        """
        assert self._session is None, "one pass at a time"
        keyed: dict[Key, Tensor] = {}
        if mode in ("replay", "observe") and self._hooks:
            if len(rows) != micro_batches or any(r is None for r in rows):
                raise ValueError(f"replay.mode: {mode} needs routes for each of {micro_batches} micro-batches; the rollout gave none")
            for index, shard in enumerate(rows):
                assert shard is not None
                if shard.shape[1] != len(self._hooks):
                    raise RuntimeError(f"micro-batch {index}: routes for {shard.shape[1]} layers, this rank has {len(self._hooks)}")
                for column, number in enumerate(self.layer_numbers):
                    keyed[index, number] = shard[:, column].long()
        self._session = Session(mode, keyed, keep_scores, self._keyed(compare_with), keep_margins=keep_margins, real_rows=real_rows)
        try:
            yield self._session
            self._finish(self._session, micro_batches)
        finally:
            self._session = None
            self._micro_batch.clear()

    def _keyed(self, scores: Sequence[RouterScores | None]) -> dict[Key, tuple[Tensor, Tensor]]:
        return {
            (index, number): (one.experts_RLK[:, column], one.log_scores_RLK[:, column])
            for index, one in enumerate(scores)
            if one is not None
            for column, number in enumerate(self.layer_numbers)
        }

    def start_micro_batch(self, chunk: int, index: int) -> None:
        """Tells the routers of a chunk which micro-batch its next forward is."""
        self._micro_batch[chunk] = index

    def choose(self, hook: RouterHook, scores: Tensor, topk: int, live: Callable[[], TopK]) -> TopK:
        """The top-k of one router call."""
        session, layer = self._session, hook.layer_number
        if session is None:
            return live()
        again = in_backward()
        key = (self._next_recompute(session, layer) if again else self._next_forward(session, hook.chunk, layer), layer)
        probs, chosen = _gather(scores, session.rows[key], topk, key, live) if session.mode == "replay" else live()
        if session.real_rows and not again:
            _observe(session, key, hook, scores, chosen if session.mode == "observe" else live()[1])
        if not again:
            _watch(session, key, hook, scores, chosen)
        return probs, chosen

    def _next_forward(self, session: Session, chunk: int, layer: int) -> int:
        index = self._micro_batch[chunk]
        seen = session.order.setdefault(layer, [])
        if index in seen:
            raise RuntimeError(f"layer {layer} routes micro-batch {index} a second time outside of a backward pass")
        seen.append(index)
        return index

    @staticmethod
    def _next_recompute(session: Session, layer: int) -> int:
        done = session.recomputed.get(layer, 0)
        seen = session.order.get(layer, [])
        if done >= len(seen):
            raise RuntimeError(f"layer {layer} recomputes {done + 1} times after {len(seen)} forwards")
        session.recomputed[layer] = done + 1
        return seen[done]

    def _finish(self, session: Session, micro_batches: int) -> None:
        for layer in self.layer_numbers:
            seen = session.order.get(layer, [])
            missing = sorted(set(range(micro_batches)) - set(seen))
            if missing:
                raise RuntimeError(f"layer {layer} never routed micro-batches {missing} of {micro_batches}")
            redone = session.recomputed.get(layer, 0)
            if redone not in (0, micro_batches):
                raise RuntimeError(f"layer {layer} recomputed {redone} of {micro_batches} micro-batches")


def _watch(session: Session, key: Key, hook: RouterHook, scores: Tensor, chosen: Tensor) -> None:
    """Keeps what the session asks for of one forward."""
    if session.mode == "record":
        session.recorded[key] = chosen.detach()
    if session.keep_scores:
        session.chosen[key] = chosen.detach()
        session.scores[key] = hook.log_scores(scores).gather(1, chosen)
    if session.keep_margins:
        session.margins[key] = margins(hook.log_scores(scores), chosen)
    if key in session.before:
        experts, then = session.before[key]
        moved = (hook.log_scores(scores).gather(1, experts) - then).abs().mean(dim=-1)
        session.shift[key[0]] = moved + session.shift.get(key[0], 0)


def _observe(session: Session, key: Key, hook: RouterHook, scores: Tensor, chosen: Tensor) -> None:
    """Compares what the router chooses with what it is given."""
    micro_batch, layer = key
    given = session.rows[key].to(chosen.device)
    comparable = session.real_rows[micro_batch].to(chosen.device) & (given[:, 0] != LIVE)
    counts, differs = compare(chosen, given, hook.log_scores(scores), comparable)
    session.agreement[layer] = counts + session.agreement[layer] if layer in session.agreement else counts
    session.differing[micro_batch] = differs.to(torch.int32) + session.differing.get(micro_batch, 0)
    here = torch.where(differs, layer, NEVER).to(torch.int32)
    before = session.first.get(micro_batch)
    session.first[micro_batch] = here if before is None else torch.minimum(here, before)


def _gather(scores: Tensor, rows: Tensor, topk: int, key: Key, live: Callable[[], TopK]) -> TopK:
    if rows.shape != (scores.shape[0], topk):
        raise RuntimeError(
            f"micro-batch {key[0]}, layer {key[1]}: routes {tuple(rows.shape)} for {scores.shape[0]} tokens with top-{topk} on this rank"
        )
    marked = rows[:, :1] == LIVE
    unreplayed = bool(marked.any())  # asked of the host's copy: no wait for the device
    rows = rows.to(scores.device)
    if unreplayed:
        rows = torch.where(marked.to(scores.device), live()[1], rows)
    return scores.gather(1, rows), rows


def _routers(chunk: nn.Module, router_type: type[nn.Module]) -> Iterable[nn.Module]:
    return (module for module in chunk.modules() if isinstance(module, router_type))
