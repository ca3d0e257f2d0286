"""verl's own functions on a padded mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from .batches import HOW_TO_INSTALL, Padded, PeerLoss
from .ours import MAX_TOKENS

pytest.importorskip("verl", reason=HOW_TO_INSTALL)

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

SMALL_PRINT = 2e-6
"""Tolerance where verl adds 1e-8 to a count or a mean, times the largest weights of these batches."""


def actor_config(**fields: Any) -> ActorConfig:
    """verl's configuration with what it insists on filled in."""
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **fields)


def policy_loss(
    name: str, aggregation: str, *, base: str = "old", whole_batch: bool = True, rollout: dict[str, Any] | None = None, **fields: Any
) -> PeerLoss:
    """A registered policy loss.

    Args:
        base: which log-probs it is given as "old".
        whole_batch: hand it the counts of loss tokens and sequences before any rejection; without, it counts what is left.
        rollout: how its trainer is to correct for old/mu first; the weights and the smaller mask go into the loss.
        fields: of its actor configuration.
    """

    def loss(x: Padded) -> Tensor:
        info: dict[str, Any] = {"loss_scale_factor": MAX_TOKENS} if aggregation == "seq-mean-token-sum-norm" else {}
        if whole_batch:
            info |= {"batch_num_tokens": x.mask.sum(), "global_batch_size": (x.mask.sum(-1) > 0).sum()}
        weights, mask, _ = correction(x, **rollout) if rollout else (None, x.mask, {})
        value, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=getattr(x, base), log_prob=x.logp, advantages=x.advantages, response_mask=mask,
            loss_agg_mode=aggregation, config=actor_config(**fields, global_batch_info=info), rollout_is_weights=weights,
        )  # fmt: skip
        return value

    return loss


def bypass(loss_type: str, aggregation: str, *, whole_batch: bool = True, rollout: dict[str, Any], **fields: Any) -> PeerLoss:
    """verl's bypass mode: old is mu, weights and masks look at theta/mu."""
    policy = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction={"loss_type": loss_type, **rollout})
    return policy_loss("bypass_mode", aggregation, base="mu", whole_batch=whole_batch, policy_loss=policy, **fields)


def correction(x: Padded, **rollout: Any) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(importance weights [B, T], mask after rejection [B, T], metrics without their prefix) of old/mu."""
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(x.old, x.mu, x.mask, **rollout)
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return weights, mask, {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
