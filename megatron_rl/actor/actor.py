"""The trainer: one policy on Megatron-core, whatever the layout. Scores tokens, takes optimizer steps, hands out its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..config import Config
from ..convert.bridge import export_hf, load_hf
from ..convert.families import Family
from ..convert.hf import HfWriter
from ..methods.objective import Denominators, Tokens
from ..methods.registry import Stack
from ..methods.segments import LocalSegments
from ..routing.layout import Place, local_positions
from ..routing.replay import Mode, RoutingReplay
from ..types import PackedBatch, TokenStats
from .logprobs import VocabShard, best_tokens, logprobs
from .metrics import Metrics, mismatch
from .model import Implementation, build_chunks, detect_implementation
from .optimizer import build_optimizer, set_learning_rate, wrap
from .parallel import Mesh

_ONE_TOKEN = torch.ones((), dtype=torch.int)
"""Megatron wants a token count with every loss; `optimizer.wrap` sees to it that nothing uses it."""

Head = Callable[[int, PackedBatch, Tensor], Any]
"""(index of the micro-batch, the micro-batch, hidden [T, H] on every tensor rank) -> what the last stage makes of it."""


@dataclass(frozen=True)
class Scored:
    """What a pass without gradient found, one entry a micro-batch."""

    stats: list[TokenStats] = field(default_factory=list)
    """On the last pipeline stage; empty elsewhere."""
    routes: list[Tensor] = field(default_factory=list)
    """routing="record": this rank's [rows, layers, K] live choices."""
    differing: list[Tensor] = field(default_factory=list)
    """routing="observe": int32 [T] number of layers, over the whole model, whose live experts differ from the given ones."""


@dataclass(frozen=True)
class Update:
    """One optimizer step."""

    metrics: Metrics
    grad_norm: float
    """Global L2 norm before clipping."""
    applied: bool
    """False where fp16 loss scaling skipped the step."""


class Actor:
    """One policy, laid out as `config.parallel` says. Every method is collective over all ranks.

    Args:
        config: the run.
        mesh: where this rank stands.
        family, hf: the model's family and its config.json.
        how: what the layers are made of; None detects.
        trains: False builds neither gradient buffers nor optimizer.
    """

    def __init__(
        self, config: Config, mesh: Mesh, family: Family, hf: Mapping[str, Any], how: Implementation | None = None, trains: bool = True
    ) -> None:
        how = how or detect_implementation()
        self.config, self.mesh, self.implementation, self.hf = config, mesh, how, hf
        self.core, self.chunks = build_chunks(config, family, hf, mesh, how)
        self.vocab_size = int(hf["vocab_size"])
        self.experts = int(self.core.num_moe_experts or 0)
        self.replay = RoutingReplay(self.chunks, TopKRouter)
        self.places = self._gather_places()
        self.wrapped: list[Any] = wrap(self.core, self.chunks) if trains else list(self.chunks)
        self._trains = trains
        self.optimizer = None

    def finish_loading(self) -> None:
        """Call once the weights are in: the optimizer copies its fp32 masters from them."""
        if self._trains and self.optimizer is None:
            self.optimizer = build_optimizer(self.config.optimizer, self.core, self.wrapped)

    def load_hf(self, folder: str | Path) -> None:
        """Fills every parameter from a Hugging Face checkpoint."""
        load_hf(self.chunks, Path(folder))
        self.finish_loading()

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

    def _gather_places(self) -> list[Place]:
        mine = self.replay.layer_numbers
        every_layer = sorted({n for numbers in self.mesh.gather(mine) for n in numbers})
        m = self.mesh
        layers = tuple(every_layer.index(n) for n in mine)
        self.moe_layers = len(every_layer)
        return m.gather(Place(m.tensor_rank, m.tensor_size, m.context_rank, m.context_size, layers))

    @property
    def place(self) -> Place:
        """This rank's."""
        return self.places[self.mesh.rank]

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: the interleaved schedule wants whole rounds of the pipeline."""
        return self.mesh.pipeline_size if len(self.chunks) > 1 else 1

    # -- forward -----------------------------------------------------------------------------------------------------------------

    def _vocab(self) -> tuple[Tensor, VocabShard]:
        """This rank's rows of the output projection, on the last stage."""
        weight_VH = self.chunks[-1].output_weight()
        group = ps.get_tensor_model_parallel_group()
        return weight_VH, VocabShard(start=group.rank() * weight_VH.shape[0], true_size=self.vocab_size, group=group)

    def _stats(self, hidden_TH: Tensor, batch: PackedBatch, entropy: bool) -> TokenStats:
        weight_VH, shard = self._vocab()
        logp_T, entropy_T = logprobs(
            hidden_TH,
            weight_VH,
            batch.labels_T.to(hidden_TH.device),
            shard,
            temperature=self.config.rollout.temperature,
            chunk=self.config.model.logprob_chunk,
        )
        return TokenStats(logp_T, entropy_T if entropy else None)

    def _run(self, batches: Sequence[PackedBatch], routing: Mode, head: Head, *, train: bool) -> tuple[list[Any], Any]:
        """One pass of Megatron's schedule; (what `head` returned a micro-batch, on the last stage; the routing session)."""

        def forward_step(iterator: Iterator[tuple[int, PackedBatch]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            index, batch = next(iterator)
            self.replay.start_micro_batch(next(i for i, w in enumerate(self.wrapped) if w is model), index)
            hidden = model(
                input_ids=batch.tokens_T[None].to(self.mesh.device),
                position_ids=batch.positions_T[None].to(self.mesh.device),
                attention_mask=None,
                packed_seq_params=packed_seq_params(batch, self.mesh.device),
            )

            def finish(output: Tensor, non_loss_data: bool = False) -> Any:
                if self.core.sequence_parallel:
                    output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=True)
                return head(index, batch, output.squeeze(1))

            return hidden, finish

        iterators = [iter(list(enumerate(batches))) for _ in self.wrapped]
        rows = [b.routes_TLK for b in batches]
        for model in self.wrapped:
            model.train(train)
        with self.replay.session(routing, rows, micro_batches=len(batches)) as session, torch.set_grad_enabled(train):
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.wrapped if len(self.wrapped) > 1 else self.wrapped[0],
                num_microbatches=len(batches),
                seq_length=batches[0].length,
                micro_batch_size=1,
                forward_only=not train,
                collect_non_loss_data=not train,
            )
        return results, session

    # -- scoring -----------------------------------------------------------------------------------------------------------------

    def score(self, batches: Sequence[PackedBatch], routing: Mode, *, entropy: bool = False) -> Scored:
        """Log-probs of every label under the current weights, without gradient.

        Args:
            routing: live, replay, record or observe (see `routing.replay`); replay and observe need `routes_TLK`.
        """

        def keep(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[int, TokenStats]:
            return index, self._stats(hidden_TH, batch, entropy)

        results, session = self._run(batches, routing, keep, train=False)
        routes, differing = [], []
        layers = self.replay.layer_numbers
        if routing == "record":
            routes = [torch.stack([session.recorded[i, n] for n in layers], dim=1) for i in range(len(batches))] if layers else []
        if routing == "observe":
            differing = [self._join(session.differing.get(i), b) for i, b in enumerate(batches)]
        return Scored([stats for _, stats in sorted(results, key=lambda r: r[0])], routes, differing)

    def next_tokens(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """The likeliest next token after each sequence's last position, routing live: [S] a micro-batch, on every rank."""

        def choose(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[int, Tensor]:
            last_S = batch.cu_seqlens[1 : batch.num_sequences + 1].long() - 1
            return index, best_tokens(hidden_TH[last_S.to(hidden_TH.device)], *self._vocab()).cpu()

        results, _ = self._run(batches, "live", choose, train=False)
        chosen = [tokens for _, tokens in sorted(results, key=lambda r: r[0])]
        return self.mesh.gather(chosen)[self.mesh.replica_ranks[-1]]

    def _join(self, local: Tensor | None, batch: PackedBatch) -> Tensor:
        """Each rank's counts of its own positions and layers, summed over the replica: [T]."""
        total_T = torch.zeros(batch.length, dtype=torch.int32)
        if local is not None:
            total_T[local_positions(batch.cu_seqlens, batch.length, self.place)] = local.cpu()
        if len(self.mesh.replica_ranks) > 1:
            dist.all_reduce(total_T, group=self.mesh.replica_group)
        return total_T

    # -- training ----------------------------------------------------------------------------------------------------------------

    def tokens(self, batch: PackedBatch, stats: TokenStats, totals: Mapping[str, Tensor] | None = None) -> Tokens:
        """What the methods see. Without old log-probs, the policy is at the start of its step: old is theta, detached."""
        device = stats.logp_T.device
        segments = LocalSegments(batch.sequence_T.to(device), batch.mask_T.to(device), batch.num_sequences, batch.turns_T.to(device))
        old_T = stats.logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T.to(device)
        return Tokens.of(
            logp_T=stats.logp_T,
            old_logp_T=old_T,
            behaviour_logp_T=batch.behaviour_logp_T.to(device),
            advantages_T=batch.advantages_T.to(device),
            segments=segments,
            totals=totals,
        )

    def statistics(self, batches: Sequence[PackedBatch], stack: Stack, routing: Mode) -> dict[str, Tensor]:
        """The mini-batch-global sums that the stack's methods ask for: a pass without gradient, then a sum over all ranks.

        The sums exist on the last stage, where the losses are computed; elsewhere the answer is empty.
        """
        if not stack.has_statistics:
            return {}

        def count(index: int, batch: PackedBatch, hidden_TH: Tensor) -> dict[str, Tensor]:
            return stack.statistics(self.tokens(batch, self._stats(hidden_TH, batch, entropy=False)))

        results, _ = self._run(batches, routing, count, train=False)
        mine: dict[str, Tensor] = {}
        for result in results:
            for name, value in result.items():
                mine[name] = mine.get(name, torch.zeros_like(value)) + value
        parts = self.mesh.gather({k: v.cpu() for k, v in mine.items()} if self.mesh.reports else {})
        return {name: torch.stack([p[name] for p in parts if name in p]).sum(0).to(value) for name, value in mine.items()}

    def update(
        self, batches: Sequence[PackedBatch], stack: Stack, over: Denominators, lr: float, *, routing: Mode, entropy: bool = False
    ) -> Update:
        """One optimizer step on one mini-batch.

        Args:
            stack: the objective and its corrections.
            over: global denominators, so that the loss is the same number under any layout and micro-batching.
            lr: this step's learning rate.
            routing: live or replay.
        """
        assert self.optimizer is not None, "load weights before training"
        totals = self.statistics(batches, stack, routing)
        divisor, extra = 1.0, Metrics()
        if stack.has_clipped_loss:
            norm = self._clipped_gradient_norm(batches, stack, over, totals, routing)
            divisor = stack.gradient_divisor(norm)
            extra.add(maxima={"clipped_gradient_norm": torch.tensor(norm)})

        def objective(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            stats = self._stats(hidden_TH, batch, entropy)
            loss, metrics = self._loss(batch, stats, stack, over, totals)
            return loss / divisor, _ONE_TOKEN, metrics

        results = self._backward(batches, routing, objective)
        set_learning_rate(self.optimizer, lr)
        applied, grad_norm, _ = self.optimizer.step()
        for part in results:
            extra.merge(part)
        return Update(extra, float(grad_norm or 0.0), bool(applied))

    def _backward(self, batches: Sequence[PackedBatch], routing: Mode, head: Head) -> list[Any]:
        """Fresh gradients of the sum of what `head` returns first."""
        assert self.optimizer is not None
        for model in self.wrapped:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run(batches, routing, head, train=True)[0]

    def _clipped_gradient_norm(
        self, batches: Sequence[PackedBatch], stack: Stack, over: Denominators, totals: Mapping[str, Tensor], routing: Mode
    ) -> float:
        """Global norm of the gradient of `StackLoss.clipped_loss`: a backward pass of its own, whose gradients are then dropped."""

        def clipped(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            loss = stack.evaluate(self.tokens(batch, self._stats(hidden_TH, batch, entropy=False), totals), over).clipped_loss
            assert loss is not None
            return loss, _ONE_TOKEN, Metrics()

        self._backward(batches, routing, clipped)
        assert self.optimizer is not None
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def _loss(
        self, batch: PackedBatch, stats: TokenStats, stack: Stack, over: Denominators, totals: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        tokens = self.tokens(batch, stats, totals)
        loss, means = stack.loss(tokens, over)
        seen, maxima = mismatch(tokens.old_logp_T, tokens.behaviour_logp_T, tokens.mask_T, "trained")
        metrics = Metrics().add(means, {"loss": loss.detach()}, maxima).add(seen)
        if stats.entropy_T is not None:
            metrics.add({"entropy": tokens.average(stats.entropy_T)})
        return loss, metrics


def packed_seq_params(batch: PackedBatch, device: torch.device) -> PackedSeqParams:
    """Megatron's description of the pack (`thd` layout)."""
    cu_seqlens = batch.cu_seqlens.to(device)
    longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def with_old(batches: Sequence[PackedBatch], scored: Scored) -> list[PackedBatch]:
    """The micro-batches with the scored log-probs as old ones (on the last stage) and recorded routes, if any."""
    out = list(batches)
    if scored.stats:
        out = [dataclasses.replace(b, old_logp_T=s.logp_T) for b, s in zip(out, scored.stats, strict=True)]
    if scored.routes:
        out = [dataclasses.replace(b, routes_TLK=r) for b, r in zip(out, scored.routes, strict=True)]
    return out
