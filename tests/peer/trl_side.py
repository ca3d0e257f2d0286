"""TRL's own trainer methods on a padded mini-batch, called with a stand-in for the trainer that holds what they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .batches import HOW_TO_INSTALL, Padded, PeerLoss
from .ours import MAX_TOKENS

pytest.importorskip("trl", reason=HOW_TO_INSTALL)

from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

SETTINGS: dict[str, Any] = {
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 2.0,
    "scale_rewards": "group",
    "num_generations": 2,
    "use_vllm": False,
    "current_gradient_accumulation_steps": 1,
}
"""What a test may set; the rest of the stand-in is switched off."""

ARGS: dict[str, Any] = {
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "use_bias_correction_kl": False,
}


class OneProcess:
    """An accelerator of one process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather


def trainer(logps: Any, **options: Any) -> SimpleNamespace:
    """The stand-in. `logps` answers what the trainer's forward pass would: (log-probs, entropies, no auxiliary loss)."""
    own = {name: options.pop(name, default) for name, default in SETTINGS.items()}
    args = {name: options.pop(name, default) for name, default in ARGS.items()}
    return SimpleNamespace(
        **own,
        args=SimpleNamespace(
            **args, steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=1, gradient_checkpointing_kwargs=None
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(logps), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        max_completion_length=MAX_TOKENS,
        num_iterations=1,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        vllm_importance_sampling_correction=True,
        **options,
    )


def loss(loss_type: str, *, gmpo: bool = False, **options: Any) -> PeerLoss:
    """GRPOTrainer._compute_loss (or GMPOTrainer's) of that type; `options` as in SETTINGS and ARGS.

    With `use_vllm`, the weights of old/mu come from GRPOTrainer itself (`importance_ratio`). All its mask is in the tool mask, since
    padding and tool tokens are both no loss tokens to it.
    """

    def of(x: Padded) -> Tensor:
        stand_in = trainer(x.logp, loss_type=loss_type, **options)
        inputs: dict[str, Any] = {
            "prompt_ids": torch.zeros(len(x.mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(x.mask), 1, dtype=torch.int64),
            "completion_ids": torch.zeros_like(x.mask, dtype=torch.int64),
            "completion_mask": torch.ones_like(x.mask),
            "tool_mask": x.mask,
            "advantages": x.advantages,
            "old_per_token_logps": x.old,
            "ref_per_token_logps": x.reference,
            "sampling_per_token_logps": x.mu,
            "num_items_in_batch": x.mask.sum(),
        }
        if gmpo:
            inputs["advantages"] = x.advantages[:, 0]
        if stand_in.use_vllm:
            inputs["importance_sampling_ratio"] = importance_ratio(x, **options)
        method = GMPOTrainer._compute_loss if gmpo else GRPOTrainer._compute_loss
        return method(stand_in, stand_in.model, inputs)

    return of


def rollout(x: Padded | None, rewards: Sequence[float | None], **options: Any) -> dict[str, Any]:
    """GRPOTrainer._generate_and_score_completions, generation and rewards given: advantages, weights of old/mu, counts.

    Without `x`, each answer is one token of log-prob 0.
    """
    n = len(rewards)
    length = 1 if x is None else x.mask.shape[1]
    stand_in = trainer(torch.zeros(n, 1) if x is None else x.old, **options)
    engine = (
        [[1]] * n,
        [[1] * length] * n,
        None if x is None else [row.long().tolist() for row in x.mask],
        ["answer"] * n,
        None if x is None else [row.tolist() for row in x.mu],
        *({}, None, None),
    )
    vars(stand_in).update(
        _generate=lambda prompts: engine,
        _calculate_rewards=lambda *_: torch.tensor([[float("nan") if r is None else r] for r in rewards]),
        **dict.fromkeys(("environment_factories", "environments", "tools", "pad_to_multiple_of", "ref_model")),
        mask_truncated_completions=False,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
        log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _pending_extra_logs={},
        _pending_metrics={},
        _logs={"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": defaultdict(list)},
    )
    answer: dict[str, Any] = GRPOTrainer._generate_and_score_completions(stand_in, [{"prompt": "question"}] * n)
    return answer


def importance_ratio(x: Padded, **options: Any) -> Tensor:
    """[B, T] or [B, 1] TRL's weights of old/mu."""
    ratio: Tensor = rollout(x, [0.0] * len(x.mask), **{**options, "num_generations": 1})["importance_sampling_ratio"]
    return ratio
