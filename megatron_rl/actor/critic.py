"""The critic: the policy's trunk under a value head, on the same machinery and in the same layout, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..config import Config
from ..convert.families import Family
from ..methods.objective import Denominators
from ..methods.value_loss import value_loss, value_of
from ..types import PackedBatch
from .base import ONE_TOKEN, MegatronModel, Update
from .metrics import Metrics
from .model import Implementation, ValueModel
from .parallel import Mesh


class Critic(MegatronModel):
    """Values of states: position t is valued before its label is sampled. It routes live: the engine's routes are the policy's."""

    def __init__(self, config: Config, mesh: Mesh, family: Family, hf: Mapping[str, Any], how: Implementation | None = None) -> None:
        super().__init__(config, mesh, family, hf, kind=ValueModel, optimizer=config.critic.optimizer, how=how)

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """fp32 [T] a micro-batch, without gradient; on the last stage, empty elsewhere. Under loss bce: probabilities of success."""
        return self.score_each(batches, "live", lambda i, b, hidden: self._value(hidden))[0]

    def _value(self, hidden_TH: Tensor) -> Tensor:
        return value_of(self.chunks[-1].value_head(hidden_TH), self.config.critic.loss)

    def update(self, batches: Sequence[PackedBatch], over: Denominators, lr: float) -> Update:
        """One optimizer step towards the micro-batches' `returns_T`, where they are not NaN; metrics are named critic/...

        Args:
            over: `tokens` counts the positions with a target, over the whole mini-batch; the loss is their mean.
        """
        settings = self.config.critic

        def head(index: int, batch: PackedBatch, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            output_T = self.chunks[-1].value_head(hidden_TH)
            assert batch.values_T is not None and batch.returns_T is not None, "the critic's targets are set before it learns"
            returns_T = batch.returns_T.to(output_T.device)
            mask_T = batch.mask_T.to(output_T.device) & ~returns_T.isnan()
            answer = value_loss(output_T, batch.values_T.to(output_T.device), returns_T, mask_T, settings.loss, settings.clip)
            loss = answer.loss_T.sum() / max(over.tokens, 1.0)
            named = {f"critic/{name}": pair for name, pair in answer.metrics.items()}
            return loss, ONE_TOKEN, Metrics().add(named, {"critic/loss": loss.detach()})

        return self.step(batches, "live", head, lr)
