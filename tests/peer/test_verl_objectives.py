"""Objectives, aggregations and penalties against verl's, on random batches: equal loss, equal gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from megatron_rl.methods.objective import reduce_loss

from .batches import Padded, assert_same, batches, padded, peer_outcome
from .ours import MAX_TOKENS, PADDING, Seq, denominators, segments_of, stack
from .verl_side import SMALL_PRINT, bypass, core_algos, policy_loss

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
many = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@many
@given(batch=batches(token_advantages=True))
def test_ppo_with_dual_clip(aggregation: str, batch: list[Seq]) -> None:
    ours = stack("ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, aggregation=aggregation)
    theirs = policy_loss("vanilla", aggregation, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    assert_same(ours, theirs, batch, SMALL_PRINT)


@many
@given(batch=batches(token_advantages=True))
def test_ppo_clip_shares(batch: list[Seq]) -> None:
    """verl's actor/pg_clipfrac is our two shares together, its pg_clipfrac_lower our dual_clip_share."""
    theirs = policy_loss("vanilla", "token-mean")
    metrics = assert_same(stack("ppo"), theirs, batch).metrics
    x = padded(batch)
    _, clipped, _, lower = core_algos.compute_policy_loss(x.old, x.logp, x.advantages, x.mask, cliprange=0.2, clip_ratio_c=3.0)
    assert metrics["ppo/clip_share_high"] + metrics["ppo/clip_share_low"] == pytest.approx(clipped.item(), abs=1e-6)
    assert metrics["ppo/dual_clip_share"] == pytest.approx(lower.item(), abs=1e-6)


OBJECTIVES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("gspo_token", {"clip_low": 3e-4, "clip_high": 4e-4}, "gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("gspo_token", {"clip_low": 0.3, "clip_high": 0.5}, "gspo", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 2.0}, "sapo", {"tau_pos": 0.5, "tau_neg": 2.0}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28}, "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    ("cispo", {"clip_low": None, "clip_high": 4.0}, "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    ("policy_gradient", {"weight": "none"}, "gpg", {}),
]


@pytest.mark.parametrize(("name", "params", "peer", "fields"), OBJECTIVES, ids=[f"{o[0]}{o[1]}" for o in OBJECTIVES])
@many
@given(batch=batches(token_advantages=True, far=9.0))
def test_objectives(name: str, params: dict[str, Any], peer: str, fields: dict[str, Any], batch: list[Seq]) -> None:
    """verl's GSPO stops at a mean log-ratio of 10, hence `far`."""
    theirs = policy_loss(peer, "seq-mean-token-mean", **fields)
    assert_same(stack(name, params, aggregation="seq-mean-token-mean"), theirs, batch, SMALL_PRINT)


@many
@given(batch=batches(far=9.0))
def test_gspo(batch: list[Seq]) -> None:
    """verl has the token form only; ours with one term a sequence is the same where a sequence has one advantage."""
    theirs = policy_loss("gspo", "seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.2)
    assert_same(stack("gspo", {"clip_low": 0.1, "clip_high": 0.2}), theirs, batch, SMALL_PRINT)


@many
@given(batch=batches())
def test_gmpo(batch: list[Seq]) -> None:
    theirs = policy_loss("geo_mean", "unused", clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert_same(stack("gmpo", {"clip": 0.4}), theirs, batch, SMALL_PRINT)


@pytest.mark.parametrize(("divergence", "peer", "threshold"), [("binary_tv", "dppo_tv", 0.1507), ("binary_kl", "dppo_kl", 0.0507)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@many
@given(batch=batches(token_advantages=True, dtypes=[torch.float64]))
def test_dppo(divergence: str, peer: str, threshold: float, aggregation: str, batch: list[Seq]) -> None:
    """verl's "old" is whatever it is given, here mu. fp64: a rounded divergence may fall on the other side of the threshold."""
    ours = stack("dppo", {"divergence": divergence, "threshold": threshold, "ratio_cap": 20.0}, aggregation=aggregation)
    theirs = policy_loss(peer, aggregation, base="mu", clip_ratio_low=threshold, clip_ratio_high=threshold, clip_ratio_c=20.0)
    assert_same(ours, theirs, batch, SMALL_PRINT)


@many
@given(batch=batches(token_advantages=True))
def test_ppo_anchored_at_mu_is_bypass_ppo_clip(batch: list[Seq]) -> None:
    """verl applies no weight there, so this is plain PPO with old = mu."""
    ours = [dataclasses.replace(s, old=s.mu) for s in batch]
    theirs = bypass("ppo_clip", "token-mean", rollout={"rollout_is": "token"}, clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert_same(stack("ppo"), theirs, ours)


PENALTIES = [("k1", "kl"), ("k1", "k1"), ("k2", "mse"), ("k2", "k2"), ("k3", "low_var_kl"), ("k3", "k3")]


@pytest.mark.parametrize(("estimator", "peer"), PENALTIES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS[:3])
@many
@given(batch=batches(far=2.0))
def test_kl_penalty(estimator: str, peer: str, aggregation: str, batch: list[Seq]) -> None:
    """As verl adds it to the loss. Its k3 stops at 10, which takes a log-ratio of 2.6; hence `far` (test_verl_differences)."""
    ours = stack("policy_gradient", {"weight": "none"}, [("kl_penalty", {"beta": 0.5, "estimator": estimator})], aggregation=aggregation)

    def theirs(x: Padded) -> torch.Tensor:
        kl = core_algos.agg_loss(core_algos.kl_penalty(x.logp, x.reference, peer), x.mask, aggregation)
        return policy_loss("gpg", aggregation)(x) + 0.5 * kl

    assert_same(ours, theirs, batch, SMALL_PRINT)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@many
@given(batch=batches(dtypes=[torch.float64]))
def test_aggregation(aggregation: str, batch: list[Seq]) -> None:
    """agg_loss of the bare log-probs, no method involved."""
    theirs, _ = peer_outcome(lambda x: core_algos.agg_loss(x.logp, x.mask, aggregation, loss_scale_factor=int(MAX_TOKENS)), batch)
    logp_T = torch.nn.functional.pad(torch.cat([s.logp for s in batch]), (0, PADDING))
    ours = reduce_loss(logp_T, segments_of(batch), aggregation, denominators(batch))  # type: ignore[arg-type]
    assert ours.item() == pytest.approx(theirs, rel=SMALL_PRINT)
