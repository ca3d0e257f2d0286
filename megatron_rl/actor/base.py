"""One model on Megatron-core in any layout: weights, routers, schedule, optimizer. `Actor` and `Critic` say what its last stage does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..config import Config, OptimizerConfig
from ..convert.bridge import load_hf
from ..convert.families import Family
from ..routing.layout import Place, context_positions, local_positions
from ..routing.replay import Mode, RoutingReplay, Session
from ..types import PackedBatch
from .metrics import Metrics
from .model import Implementation, PolicyModel, ValueModel, build_chunks, detect_implementation
from .optimizer import build_optimizer, set_learning_rate, wrap
from .parallel import Mesh

ONE_TOKEN = torch.ones((), dtype=torch.int)
"""Megatron wants a token count with every loss; `optimizer.wrap` sees to it that nothing uses it."""

Head = Callable[[int, PackedBatch, Tensor], Any]
"""(index of the micro-batch, the micro-batch, hidden [T, H] on every tensor rank) -> what the last stage makes of it."""


@dataclass(frozen=True)
class Update:
    """One optimizer step."""

    metrics: Metrics
    grad_norm: float
    """Global L2 norm before clipping."""
    applied: bool
    """False where fp16 loss scaling skipped the step."""
    old_logp: list[Tensor] = field(default_factory=list)
    """Where asked for, on the last stage: fp32 [T] a micro-batch, log-probs under the weights that started the rollout step."""


class MegatronModel:
    """This rank's share of a model. Every method is collective over all ranks.

    Args:
        config: the run.
        mesh: where this rank stands.
        family, hf: the model's family and its config.json.
        kind: what the chunks are.
        optimizer: None builds neither gradient buffers nor optimizer.
        how: what the layers are made of; None detects.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        family: Family,
        hf: Mapping[str, Any],
        *,
        kind: type[PolicyModel],
        optimizer: OptimizerConfig | None,
        how: Implementation | None = None,
    ) -> None:
        how = how or detect_implementation()
        self.config, self.mesh, self.implementation, self.hf = config, mesh, how, hf
        self.core, self.chunks = build_chunks(config, family, hf, mesh, how, kind)
        self.experts = int(self.core.num_moe_experts or 0)
        self.replay = RoutingReplay(self.chunks, TopKRouter)
        self.places = self._gather_places()
        self.wrapped: list[Any] = wrap(self.core, self.chunks) if optimizer is not None else list(self.chunks)
        self.optimizer_config = optimizer
        self.optimizer: Any = None
        self._is_value_model = issubclass(kind, ValueModel)

    def finish_loading(self) -> None:
        """Call once the weights are in: the optimizer copies its fp32 masters from them."""
        if self.optimizer_config is not None and self.optimizer is None:
            self.optimizer = build_optimizer(self.optimizer_config, self.core, self.wrapped)

    def load_hf(self, folder: str | Path) -> None:
        """Fills every parameter from a Hugging Face checkpoint; a value head stays as it is."""
        load_hf(self.chunks, Path(folder), trunk=self._is_value_model)
        self.finish_loading()

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

    # -- one pass ----------------------------------------------------------------------------------------------------------------

    def run(self, batches: Sequence[PackedBatch], routing: Mode, head: Head, *, train: bool, **session: Any) -> tuple[list[Any], Session]:
        """One pass of Megatron's schedule.

        Args:
            routing: how routers choose (see `routing.replay`).
            head: applied to each micro-batch's hidden states on the last stage; with `train` it returns (loss, ONE_TOKEN, anything).
            train: with gradient.
            session: further arguments of `RoutingReplay.session`.

        Returns:
            What `head` returned for each micro-batch, in the schedule's order, on the last stage (without the loss when training);
            and the routing session.
        """

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
                    # A vocabulary shard's gradient is a part of the whole; a value head's is the whole on every tensor rank.
                    output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=not self._is_value_model)
                return head(index, batch, output.squeeze(1))

            return hidden, finish

        iterators = [iter(list(enumerate(batches))) for _ in self.wrapped]
        rows = [b.routes_TLK for b in batches]
        for model in self.wrapped:
            model.train(train)
        with self.replay.session(routing, rows, micro_batches=len(batches), **session) as opened, torch.set_grad_enabled(train):
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.wrapped if len(self.wrapped) > 1 else self.wrapped[0],
                num_microbatches=len(batches),
                seq_length=int(batches[0].cu_seqlens[-1]),  # of the whole pack: Megatron divides by CP and TP itself
                micro_batch_size=1,
                forward_only=not train,
                collect_non_loss_data=not train,
            )
        return results, opened

    def score_each(self, batches: Sequence[PackedBatch], routing: Mode, head: Head, **session: Any) -> tuple[list[Any], Session]:
        """A pass without gradient; `head`'s answers in the order of the micro-batches, empty but on the last stage."""
        results, opened = self.run(batches, routing, lambda i, batch, hidden: (i, head(i, batch, hidden)), train=False, **session)
        return [answer for _, answer in sorted(results, key=lambda pair: pair[0])], opened

    def own_rows(self, batch: PackedBatch) -> Tensor:
        """bool, which of the rows that pass this rank's routers are no padding."""
        return batch.real_T.chunk(self.place.tensor_size)[self.place.tensor_rank]

    def join(self, local: Tensor | None, batch: PackedBatch, dtype: torch.dtype, op: Any = dist.ReduceOp.SUM, empty: float = 0) -> Tensor:
        """Each rank's numbers for its own positions and layers, reduced over the replica: [T, ...], in the dtype asked for.

        Args:
            local: [rows, ...] in the order in which tokens pass this rank's routers; None where it has none.
            empty: what a rank says of positions that are not its own.
        """
        length = int(batch.cu_seqlens[-1])
        total_T = torch.full((length, *(() if local is None else local.shape[1:])), empty, dtype=dtype)
        if local is not None:
            total_T[local_positions(batch.cu_seqlens, length, self.place)] = local.to(dtype).cpu()
        if len(self.mesh.replica_ranks) > 1:
            dist.all_reduce(total_T, op=op, group=self.mesh.replica_group)
        return total_T[context_positions(batch.cu_seqlens, self.mesh.context_rank, self.mesh.context_size)]

    # -- training ----------------------------------------------------------------------------------------------------------------

    def backward(self, batches: Sequence[PackedBatch], routing: Mode, head: Head) -> list[Any]:
        """Fresh gradients of the sum of what `head` returns first; the rest of what it returns."""
        assert self.optimizer is not None, "load weights before training"
        for model in self.wrapped:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.run(batches, routing, head, train=True)[0]

    def step(self, batches: Sequence[PackedBatch], routing: Mode, head: Head, lr: float) -> Update:
        """`backward`, clipping, one optimizer step; `head` returns (loss, ONE_TOKEN, Metrics)."""
        metrics = Metrics()
        for part in self.backward(batches, routing, head):
            metrics.merge(part)
        set_learning_rate(self.optimizer, lr)
        applied, grad_norm, _ = self.optimizer.step()
        return Update(metrics, float(grad_norm or 0.0), bool(applied))


def packed_seq_params(batch: PackedBatch, device: torch.device) -> PackedSeqParams:
    """Megatron's description of the pack (`thd` layout)."""
    cu_seqlens = batch.cu_seqlens.to(device)
    longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
