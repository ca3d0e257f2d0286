"""Objectives, weights and masks against TRL's GRPOTrainer and GMPOTrainer, on random batches: equal loss, equal gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from .batches import assert_same, batches
from .ours import Seq, stack
from .trl_side import loss

many = settings(max_examples=25, deadline=None)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
EPSILON = {"epsilon_low": 0.2, "epsilon_high": 0.28}
GATES = {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}
TIGHT, TIGHT_EPSILON = {"clip_low": 0.1, "clip_high": 0.15}, {"epsilon_low": 0.1, "epsilon_high": 0.15}
SEQUENCE = {"importance_sampling_level": "sequence"}

Ours = tuple[str, dict[str, Any], str]
OBJECTIVES: list[tuple[Ours, str, dict[str, Any]]] = [
    (("grpo", CLIP, "seq-mean-token-mean"), "grpo", EPSILON),
    (("grpo", CLIP, "token-mean"), "bnpo", EPSILON),
    (("dr_grpo", CLIP, "seq-mean-token-sum-norm"), "dr_grpo", EPSILON),
    (("dapo_dynamic", CLIP, "token-mean"), "dapo", EPSILON),
    (("ppo", {**CLIP, "dual_clip": 3.0}, "seq-mean-token-mean"), "grpo", {**EPSILON, "delta": 3.0}),
    (("cispo", {"clip_high": 4.0}, "token-mean"), "cispo", {"epsilon_high": 5.0}),
    (("sapo", {}, "seq-mean-token-mean"), "sapo", {}),
    (("sapo", {"tau_pos": 0.5, "tau_neg": 2.0}, "seq-mean-token-mean"), "sapo", GATES),
]
BY_SEQUENCE: list[tuple[Ours, str, dict[str, Any]]] = [
    (("gspo", TIGHT, "seq-mean-token-mean"), "grpo", {**TIGHT_EPSILON, **SEQUENCE}),
    (("gspo", TIGHT, "seq-mean-token-sum"), "luspo", {**TIGHT_EPSILON, **SEQUENCE}),
    (("vespo", {"anchor": "theta/old"}, "token-mean"), "vespo", {}),
    (
        ("vespo", {"anchor": "theta/old", "k_pos": 1.0, "lambda_pos": 1.5, "k_neg": 2.0, "lambda_neg": 4.0}, "token-mean"),
        "vespo",
        {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 4.0},
    ),
]


def label(case: Any) -> str | None:
    return case if isinstance(case, str) else None


@pytest.mark.parametrize(("ours", "loss_type", "options"), OBJECTIVES, ids=label)
@many
@given(batch=batches(token_advantages=True))
def test_objectives(ours: Ours, loss_type: str, options: dict[str, Any], batch: list[Seq]) -> None:
    name, params, aggregation = ours
    assert_same(stack(name, params, aggregation=aggregation), loss(loss_type, **options), batch)


@pytest.mark.parametrize(("ours", "loss_type", "options"), BY_SEQUENCE, ids=label)
@many
@given(batch=batches())
def test_sequence_objectives(ours: Ours, loss_type: str, options: dict[str, Any], batch: list[Seq]) -> None:
    name, params, aggregation = ours
    # TRL bounds VESPO's log w at log 1e-8, where phi is below 1e-15 of anything
    assert_same(stack(name, params, aggregation=aggregation), loss(loss_type, **options), batch, 1e-7 if name == "vespo" else 0.0)


@many
@given(batch=batches())
def test_gmpo(batch: list[Seq]) -> None:
    assert_same(stack("gmpo", {"clip": 0.4}), loss("gmpo", gmpo=True, epsilon_low=0.4, epsilon_high=0.4), batch)


@many
@given(batch=batches())
def test_kl_to_the_reference(batch: list[Seq]) -> None:
    """Added to every loss token, clipped or not, before the mean over tokens then sequences."""
    ours = stack("grpo", CLIP, [("kl_penalty", {"beta": 0.3, "base": "reference", "estimator": "k3"})])
    assert_same(ours, loss("grpo", beta=0.3, **EPSILON), batch)


MODES: list[tuple[str, tuple[str, dict[str, Any]], dict[str, Any]]] = [
    ("token_truncate", ("tis", {"cap": 2.0}), {"vllm_importance_sampling_clip_max": 2.0}),
    ("sequence_truncate", ("tis", {"cap": 3.0, "level": "sequence"}), {"vllm_importance_sampling_clip_max": 3.0}),
    (
        "token_mask",
        ("icepop", {"low": 0.5, "high": 5.0}),
        {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0},
    ),
    ("sequence_mask", ("mis", {"high": 3.0}), {"vllm_importance_sampling_clip_max": 3.0}),
]


@pytest.mark.parametrize(("mode", "correction", "options"), MODES, ids=label)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
@many
@given(batch=batches(dtypes=[torch.float32]))
def test_weights_of_the_engine_gap(
    loss_type: str, mode: str, correction: tuple[str, dict[str, Any]], options: dict[str, Any], batch: list[Seq]
) -> None:
    """TRL's four modes, computed by its own rollout step (which reads the engine's log-probs into fp32), on three losses."""
    name, params, aggregation = {
        "grpo": ("grpo", CLIP, "seq-mean-token-mean"),
        "dapo": ("dapo_dynamic", CLIP, "token-mean"),
        "cispo": ("cispo", {"clip_high": 0.28}, "token-mean"),
    }[loss_type]
    high = 1.28 if loss_type == "cispo" else 0.28
    theirs = loss(loss_type, use_vllm=True, epsilon_low=0.2, epsilon_high=high, vllm_importance_sampling_mode=mode, **options)
    assert_same(stack(name, params, [correction], aggregation), theirs, batch)


@pytest.mark.parametrize("delta", [0.0507, 0.5007])
@many
@given(batch=batches())
def test_off_policy_sequence_mask(delta: float, batch: list[Seq]) -> None:
    ours = stack("grpo", CLIP, [("opsm", {"delta": delta}), ("kl_penalty", {"beta": 0.1})])
    assert_same(ours, loss("grpo", off_policy_mask_threshold=delta, beta=0.1, **EPSILON), batch)


@many
@given(batch=batches(dtypes=[torch.float32], far=9.0))
def test_vespo_over_both_gaps(batch: list[Seq]) -> None:
    """theta/old times TRL's old/mu is our anchor theta/mu, as long as nothing is truncated (test_trl_differences)."""
    theirs = loss("vespo", use_vllm=True, vllm_importance_sampling_clip_max=1e9)
    assert_same(stack("vespo", {}), theirs, batch, 1e-4)
