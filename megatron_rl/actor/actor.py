"""The policy: scores tokens, takes optimizer steps, hands out its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from ..config import Config
from ..convert.bridge import export_hf
from ..convert.families import Family
from ..convert.hf import HfWriter
from ..methods.objective import Denominators, Tokens, TopK
from ..methods.stack import Stack
from ..methods.uniform import token_uniforms
from ..routing.agreement import NEVER, LayerCounts
from ..routing.replay import Mode, Session
from ..types import PackedBatch, RouterScores, TokenStats
from .base import ONE_TOKEN, MegatronModel, Update
from .feed import last_positions
from .logprobs import Support, VocabShard, best_tokens, vocabulary_stats
from .metrics import Metrics, mismatch
from .model import Implementation, PolicyModel
from .parallel import Mesh
from .segments import build_segments


@dataclass(frozen=True)
class Scored:
    """What a pass without gradient found, one entry a micro-batch."""

    stats: list[TokenStats] = field(default_factory=list)
    """On the last pipeline stage; empty elsewhere."""
    routes: list[Tensor] = field(default_factory=list)
    """routing="record": this rank's [rows, layers, K] live choices."""
    router_scores: list[RouterScores] = field(default_factory=list)
    """Where asked for: this rank's experts and their scores."""
    margins: list[Tensor] = field(default_factory=list)
    """Where asked for: fp32 [rows, layers] by how much this rank's routers prefer the least of the experts in use to the best other."""
    differing: list[Tensor] = field(default_factory=list)
    """routing="observe": int32 [T] number of layers, over the whole model, whose live experts differ from the given ones."""
    first: list[Tensor] = field(default_factory=list)
    """routing="observe": int32 [T] number of the shallowest such layer; `agreement.NEVER` where there is none."""
    agreement: dict[int, LayerCounts] = field(default_factory=dict)
    """routing="observe": depth among the MoE layers -> this rank's counts over its own rows."""
    shift: list[Tensor] = field(default_factory=list)
    """Where asked for: fp32 [T] mean |log router score now / then| over layers and the experts chosen then (RSPO)."""


@dataclass(frozen=True)
class Restriction:
    """Which part of the vocabulary the policy's distribution lives on."""

    min_p: float | None
    """Tokens at least this fraction as likely as the likeliest; None takes the keep-sets that came with the rollout."""

    @staticmethod
    def of(stack: Stack) -> Restriction | None:
        """What the stack's vocabulary method asks for; None without one."""
        if stack.vocabulary is None:
            return None
        return Restriction(None if "keep_sets" in stack.vocabulary.needs else stack.vocabulary.config.rho)

    def support(self, batch: PackedBatch) -> Support:
        """For one micro-batch."""
        if self.min_p is not None:
            return Support(min_p=self.min_p)
        assert batch.keep_TK is not None, "the rollout returns keep-sets wherever a stack needs them"
        return Support(keep_TK=batch.keep_TK)


class Actor(MegatronModel):
    """A policy, laid out as `config.parallel` says. Every method is collective over all ranks.

    Args:
        config: the run.
        mesh: where this rank stands.
        family, hf: the model's family and its config.json.
        how: what the layers are made of; None detects.
        trains: False builds neither gradient buffers nor optimizer.
        restriction: None for the whole vocabulary.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        family: Family,
        hf: Mapping[str, Any],
        how: Implementation | None = None,
        trains: bool = True,
        restriction: Restriction | None = None,
    ) -> None:
        super().__init__(config, mesh, family, hf, kind=PolicyModel, optimizer=config.optimizer if trains else None, how=how)
        self.vocab_size = int(hf["vocab_size"])
        self.restriction = restriction

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """(Hugging Face name, full tensor) in one order on every rank; the tensor is None except on global rank 0."""
        return export_hf(self.chunks, self.hf, dtype=dtype)

    def save_hf(self, folder: str | Path, template: str | Path) -> None:
        """Writes the weights in Hugging Face format, in the trainer's dtype, with the config and tokenizer of `template`.

        `folder` must not exist.
        """
        if self.mesh.is_main:
            with HfWriter(folder, template) as writer:
                for name, tensor in self.weights():
                    assert tensor is not None, "global rank 0 receives every tensor"
                    writer.add(name, tensor)
        else:
            for _ in self.weights():
                pass
        self.mesh.barrier()

    # -- scoring -----------------------------------------------------------------------------------------------------------------

    def _vocab(self) -> tuple[Tensor, VocabShard]:
        """This rank's rows of the output projection, on the last stage."""
        weight_VH = self.chunks[-1].output_weight()
        group = ps.get_tensor_model_parallel_group()
        return weight_VH, VocabShard(start=group.rank() * weight_VH.shape[0], true_size=self.vocab_size, group=group)

    def _stats(self, hidden_TH: Tensor, batch: PackedBatch, *, entropy: bool = False, top_k: int = 0) -> TokenStats:
        """The label's statistics, and the log-probs of every candidate the batch brings along."""
        weight_VH, shard = self._vocab()
        asked = [ids for ids in (batch.candidate_ids_TK, batch.old_top_ids_TK) if ids is not None]
        found = vocabulary_stats(
            hidden_TH,
            weight_VH,
            batch.labels_T.to(hidden_TH.device),
            shard,
            temperature=self.config.rollout.temperature,
            chunk=self.config.model.logprob_chunk,
            entropy=entropy,
            support=None if self.restriction is None else self.restriction.support(batch),
            ids_TJ=torch.cat(asked, dim=1).to(hidden_TH.device) if asked else None,
            top_k=top_k,
        )
        parts = iter(() if found.at_ids_TJ is None else found.at_ids_TJ.split([ids.shape[1] for ids in asked], dim=1))
        return TokenStats(
            found.logp_T,
            found.entropy_T,
            inside_T=found.inside_T,
            kept_mass_T=found.kept_mass_T,
            top_ids_TK=found.top_ids_TK,
            top_logp_TK=found.top_logp_TK,
            candidate_logp_TK=None if batch.candidate_ids_TK is None else next(parts),
            old_top_logp_TK=None if batch.old_top_ids_TK is None else next(parts),
        )

    def score(
        self,
        batches: Sequence[PackedBatch],
        routing: Mode,
        *,
        entropy: bool = False,
        top_k: int = 0,
        router_scores: bool = False,
        router_margins: bool = False,
        observe: bool = False,
        compare_with: Sequence[RouterScores] | None = None,
    ) -> Scored:
        """Log-probs of every label under the current weights, without gradient.

        Args:
            routing: live, replay, record or observe (see `routing.replay`); replay and observe need `routes_TLK`.
            top_k: also the likeliest K tokens at each position.
            router_scores: also the routers' log-scores of the experts they chose.
            router_margins: also by how much they preferred those.
            observe: with replay, also how what routers would choose agrees with the given routes; "observe" does so anyway.
            compare_with: also how far routers' scores are from these of an earlier pass (`Scored.shift`); on all ranks or on none.
        """
        observed = batches if observe or routing == "observe" else ()
        stats, session = self.score_each(
            batches,
            routing,
            lambda _, b, hidden: self._stats(hidden, b, entropy=entropy, top_k=top_k),
            keep_scores=router_scores,
            keep_margins=router_margins,
            real_rows=[self.own_rows(b) for b in observed],
            compare_with=compare_with or (),
        )
        layers = self.replay.layer_numbers

        def stacked(found: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
            return [torch.stack([found[i, n] for n in layers], dim=1) for i in range(len(batches))] if layers else []

        return Scored(
            stats,
            stacked(session.recorded) if routing == "record" else [],
            [RouterScores(*pair) for pair in zip(stacked(session.chosen), stacked(session.scores), strict=True)] if router_scores else [],
            stacked(session.margins) if router_margins else [],
            [self.join(session.differing.get(i), b, torch.int32) for i, b in enumerate(observed)],
            [self.join(session.first.get(i), b, torch.int32, dist.ReduceOp.MIN, NEVER) for i, b in enumerate(observed)],
            {self.place.layers[layers.index(n)]: counts for n, counts in session.agreement.items()},
            self._shifts(batches, session) if compare_with is not None else [],  # collective, on a stage that routes nothing, too
        )

    def router_shift(self, batches: Sequence[PackedBatch], routing: Mode) -> list[Tensor]:
        """fp32 [T] a micro-batch, on every rank: mean |log router score now / then| over layers and the experts chosen then (RSPO).

        The micro-batches carry `old_router`.
        """
        before = [b.old_router for b in batches]
        _, session = self.score_each(batches, routing, lambda *_: None, compare_with=before)
        return self._shifts(batches, session)

    def _shifts(self, batches: Sequence[PackedBatch], session: Session) -> list[Tensor]:
        return [self.join(session.shift.get(i), b, torch.float32) / self.moe_layers for i, b in enumerate(batches)]

    def next_tokens(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """The likeliest next token after each sequence's last position, routing live: [S] a micro-batch, on every rank."""

        def choose(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
            last_S, position_S = last_positions(batch)
            return position_S, best_tokens(hidden_TH[last_S.clamp(min=0).to(hidden_TH.device)], *self._vocab()).cpu()

        everyone = self.mesh.gather(self.score_each(batches, "live", choose)[0])
        shares = [everyone[rank] for rank in self.mesh.replica_ranks if everyone[rank]]
        tokens = []
        for parts in zip(*shares, strict=True):
            # The context-parallel rank that holds a sequence's last position knows its next token.
            position_RS, token_RS = (torch.stack(x) for x in zip(*parts, strict=True))
            tokens.append(token_RS.gather(0, position_RS.argmax(0, keepdim=True))[0])
        return tokens

    # -- training ----------------------------------------------------------------------------------------------------------------

    def tokens(self, batch: PackedBatch, stats: TokenStats, totals: Mapping[str, Tensor] | None = None, *, salt: int = 0) -> Tokens:
        """What the methods see. Without old log-probs, the policy is at the start of its step: old is theta, detached.

        Args:
            salt: tells apart the uniform draws of different optimizer steps.
        """
        device = stats.logp_T.device

        def here(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        segments = build_segments(batch, device, self.mesh.context_group)
        old_T = here(batch.old_logp_T)
        # Leaders number their own samples: interleaved, the numbers of all leaders differ, and are those of one leader with all of them.
        sample_S = torch.cat([batch.sample_S, batch.sample_S.new_tensor([-1])]) * self.mesh.data_size + self.mesh.data_rank
        return Tokens.of(
            logp_T=stats.logp_T,
            old_logp_T=stats.logp_T.detach() if old_T is None else old_T,
            behaviour_logp_T=batch.behaviour_logp_T.to(device),
            advantages_T=batch.advantages_T.to(device),
            segments=segments,
            totals=totals,
            behaviour_top_k=_top_k(batch.labels_T, batch.candidate_ids_TK, here(batch.candidate_logp_TK), stats.candidate_logp_TK),
            old_top_k=_top_k(batch.labels_T, batch.old_top_ids_TK, here(batch.old_top_logp_TK), stats.old_top_logp_TK),
            uniform_T=token_uniforms(sample_S[batch.sequence_T], batch.positions_T, salt).to(device),
            router_shift_T=here(batch.router_shift_T),
            reference_logp_T=here(batch.reference_logp_T),
            inside_T=stats.inside_T,
            kept_mass_T=stats.kept_mass_T,
        )

    def statistics(self, batches: Sequence[PackedBatch], stack: Stack, routing: Mode, *, salt: int = 0) -> dict[str, Tensor]:
        """The mini-batch-global sums that the stack's methods ask for: a pass without gradient, then a sum over all ranks.

        The sums exist on the last stage, where the losses are computed; elsewhere the answer is empty.
        """
        if not stack.has_statistics:
            return {}

        def count(index: int, batch: PackedBatch, hidden_TH: Tensor) -> dict[str, Tensor]:
            return stack.statistics(self.tokens(batch, self._stats(hidden_TH, batch), salt=salt))

        mine: dict[str, Tensor] = {}
        for result in self.score_each(batches, routing, count)[0]:
            for name, value in result.items():
                mine[name] = mine.get(name, torch.zeros_like(value)) + value
        parts = self.mesh.gather({k: v.cpu() for k, v in mine.items()} if self.mesh.reports else {})
        return {name: torch.stack([p[name] for p in parts if name in p]).sum(0).to(value) for name, value in mine.items()}

    def update(
        self,
        batches: Sequence[PackedBatch],
        stack: Stack,
        over: Denominators,
        lr: float,
        *,
        routing: Mode,
        entropy: bool = False,
        salt: int = 0,
        keep_old: bool = False,
    ) -> Update:
        """One optimizer step on one mini-batch.

        Args:
            stack: the objective and its corrections.
            over: global denominators, so that the loss is the same number under any layout and micro-batching.
            lr: this step's learning rate.
            routing: live or replay.
            salt: see `tokens`.
            keep_old: also return old log-probs: the batch's, or those of this forward where it has none.
        """
        old: dict[int, Tensor] = {}
        totals = self.statistics(batches, stack, routing, salt=salt)
        divisor, extra = 1.0, Metrics()
        if stack.has_clipped_loss:
            norm = self._clipped_gradient_norm(batches, stack, over, totals, routing, salt)
            divisor = stack.gradient_divisor(norm)
            extra.add(maxima={"clipped_gradient_norm": torch.tensor(norm)})

        def objective(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            stats = self._stats(hidden_TH, batch, entropy=entropy)
            loss, metrics = self._loss(batch, stats, stack, over, totals, salt)
            if keep_old:
                old[index] = stats.logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T
            return loss / divisor, ONE_TOKEN, metrics

        done = self.step(batches, routing, objective, lr)
        return dataclasses.replace(done, metrics=extra.merge(done.metrics), old_logp=[old[i] for i in sorted(old)])

    def _clipped_gradient_norm(
        self, batches: Sequence[PackedBatch], stack: Stack, over: Denominators, totals: Mapping[str, Tensor], routing: Mode, salt: int
    ) -> float:
        """Global norm of the gradient of `StackLoss.clipped_loss`: a backward pass of its own, whose gradients are then dropped."""

        def clipped(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            loss = stack.evaluate(self.tokens(batch, self._stats(hidden_TH, batch), totals, salt=salt), over).clipped_loss
            assert loss is not None
            return loss, ONE_TOKEN, Metrics()

        self.backward(batches, routing, clipped)
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def _loss(
        self, batch: PackedBatch, stats: TokenStats, stack: Stack, over: Denominators, totals: Mapping[str, Tensor], salt: int
    ) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        tokens = self.tokens(batch, stats, totals, salt=salt)
        loss, means = stack.loss(tokens, over)
        seen, maxima = mismatch(tokens.old_logp_T, tokens.behaviour_logp_T, tokens.mask_T, "trained")
        metrics = Metrics().add(means, {"loss": loss.detach()}, maxima).add(seen)
        if stats.entropy_T is not None:
            metrics.add({"entropy": tokens.average(stats.entropy_T)})
        return loss, metrics


def _top_k(labels_T: Tensor, ids_TK: Tensor | None, base_logp_TK: Tensor | None, logp_TK: Tensor | None) -> TopK | None:
    if ids_TK is None or base_logp_TK is None or logp_TK is None:
        return None
    return TopK(logp_TK, base_logp_TK, (ids_TK == labels_T[:, None]).any(dim=1).to(logp_TK.device))


def with_old(batches: Sequence[PackedBatch], scored: Scored) -> list[PackedBatch]:
    """The micro-batches with what was scored at the start of the step: old log-probs (on the last stage), routes, router scores."""
    out = list(batches)
    if scored.stats:
        out = [
            dataclasses.replace(b, old_logp_T=s.logp_T, old_top_ids_TK=s.top_ids_TK, old_top_logp_TK=s.top_logp_TK)
            for b, s in zip(out, scored.stats, strict=True)
        ]
    if scored.routes:
        out = [dataclasses.replace(b, routes_TLK=r) for b, r in zip(out, scored.routes, strict=True)]
    if scored.router_scores:
        out = [dataclasses.replace(b, old_router=r) for b, r in zip(out, scored.router_scores, strict=True)]
    return out
