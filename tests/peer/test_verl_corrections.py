"""Weights, rejection and their metrics against verl's rollout_corr_helper: equal loss and gradient once they are in a loss.

verl is given the counts of the mini-batch before rejection (`whole_batch`); what it does without is in test_verl_differences.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from megatron_rl.methods import estimators
from megatron_rl.methods.epic import window

from .batches import assert_same, batches, one, padded
from .ours import Seq, evaluate, pack, stack
from .verl_side import SMALL_PRINT, bypass, correction, policy_loss

many = settings(max_examples=25, deadline=None)
AGGREGATION = "token-mean"
Correction = tuple[str, dict[str, Any]]

WEIGHTS: list[tuple[Correction, dict[str, Any]]] = [
    (("tis", {"cap": 2.0}), {"rollout_is": "token", "rollout_is_threshold": 2.0}),
    (("tis", {"cap": 5.0, "level": "sequence"}), {"rollout_is": "sequence", "rollout_is_threshold": 5.0}),
    (("icepop", {"low": 0.5, "high": 5.0}), {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
    (("mis", {"low": 0.5, "high": 2.0}), {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"}),
    (("snis", {"level": "token", "cap": 2.0}), {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}),
    (("snis", {"cap": 2.0}), {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}),
]
LOWEST, HIGHEST = window(0.2507, "forward")
"""The ratios between which k3 stays below 0.2507."""
TWO_SIDED = math.sqrt(2 * 0.1507)
"""|log-ratio| at which k2 is 0.1507."""

NONE = {"geo_low": 0.0, "geo_high": 1e12}
MASKS: list[tuple[Correction, dict[str, Any]]] = [
    # verl reads k1 bounds as bounds of mu/old: the symmetric ones mean the same (test_verl_differences has the others).
    (("mis_po", {"token_low": 1 / 1.3007, "token_high": 1.3007, **NONE}), {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.3007}),
    (
        ("mis_po", {"token_low": math.exp(-TWO_SIDED), "token_high": math.exp(TWO_SIDED), **NONE}),
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1507},
    ),
    (("mis_po", {"token_low": LOWEST, "token_high": HIGHEST, **NONE}), {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.2507}),
    (("geo_rs", {"low": 1 / 1.1007, "high": 1.1007}), {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1007}),
    (
        ("geo_rs", {"low": 1 / 2.0007, "high": 2.0007, "level": "sequence"}),
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0007},
    ),
    (("trm", {"criterion": "max", "max_threshold": 0.0507}), {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.0507}),
    (("trm", {"criterion": "mean", "mean_threshold": 0.0207}), {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.0207}),
    (
        ("trm", {"criterion": "both", "max_threshold": 0.0507, "mean_threshold": 0.0207}),
        {"rollout_rs": "seq_max_k2,seq_mean_k3", "rollout_rs_threshold": "0.0507,0.0207"},
    ),
    (
        ("mis_po", {"token_low": 1 / 1.3007, "token_high": 1.3007, "geo_low": 1 / 1.1007, "geo_high": 1.1007}),
        {"rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "1.3007,1.1007"},
    ),
]
EVERY = [*WEIGHTS, *MASKS]
IDS = [f"{ours[0]}-{'-'.join(str(v) for v in theirs.values())}" for ours, theirs in EVERY]


KEPT = one([-1.0], [-1.0], advantage=0.5)
"""An on-policy sequence: verl divides by zero where IcePop drops everything (test_verl_differences)."""


def with_pair(ours: Correction, pair: str) -> Correction:
    return ours[0], {**ours[1], "pair": pair}


@pytest.mark.parametrize(("ours", "rollout"), EVERY, ids=IDS)
@many
@given(batch=batches(token_advantages=True, dtypes=[torch.float64]))
def test_on_ppo(ours: Correction, rollout: dict[str, Any], batch: list[Seq]) -> None:
    """old/mu, three policies: verl's decoupled mode."""
    theirs = policy_loss("vanilla", AGGREGATION, rollout=rollout)
    assert_same(stack("ppo", {}, [with_pair(ours, "old/mu")]), theirs, [*batch, KEPT], SMALL_PRINT)


@pytest.mark.parametrize(("ours", "rollout"), EVERY, ids=IDS)
@many
@given(batch=batches(token_advantages=True, dtypes=[torch.float64], far=9.0))
def test_on_reinforce(ours: Correction, rollout: dict[str, Any], batch: list[Seq]) -> None:
    """theta/mu, two policies: verl's bypass mode with loss_type reinforce."""
    assert_same(
        stack("policy_gradient", {"weight": "none"}, [with_pair(ours, "theta/mu")], AGGREGATION),
        bypass("reinforce", AGGREGATION, rollout=rollout),
        [*batch, KEPT],
        SMALL_PRINT,
    )


@many
@given(batch=batches(dtypes=[torch.float32]))
def test_single_precision(batch: list[Seq]) -> None:
    theirs = policy_loss("vanilla", "seq-mean-token-mean", rollout={"rollout_is": "token", "rollout_is_threshold": 2.0})
    assert_same(stack("ppo", {}, [("tis", {})], "seq-mean-token-mean"), theirs, batch)


@many
@given(batch=batches())
def test_weight_and_rejection_together(batch: list[Seq]) -> None:
    rollout = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1007}
    ours = stack("ppo", {}, [("tis", {}), ("geo_rs", {"low": 1 / 1.1007, "high": 1.1007})])
    assert_same(ours, policy_loss("vanilla", AGGREGATION, rollout=rollout), batch, SMALL_PRINT)


@pytest.mark.parametrize("name", ["sapo", "cispo", "gspo", "gpg"])
@many
@given(batch=batches(dtypes=[torch.float64], far=9.0))
def test_token_weights_on_other_objectives(name: str, batch: list[Seq]) -> None:
    ours = {
        "sapo": ("sapo", {}),
        "cispo": ("cispo", {"clip_low": 0.2, "clip_high": 0.2}),
        "gspo": ("gspo_token", {"clip_low": 0.2, "clip_high": 0.2}),
        "gpg": ("policy_gradient", {"weight": "none"}),
    }[name]
    theirs = policy_loss(name, "seq-mean-token-mean", rollout={"rollout_is": "token"})
    assert_same(stack(*ours, [("tis", {})], "seq-mean-token-mean"), theirs, batch, SMALL_PRINT)


@many
@given(batch=batches(dtypes=[torch.float64]))
def test_sequence_weights_on_gmpo(batch: list[Seq]) -> None:
    theirs = policy_loss("geo_mean", "unused", clip_ratio_low=0.4, clip_ratio_high=0.4, rollout={"rollout_is": "sequence"})
    # verl takes exp(mean(log(w + 1e-10))) of the weights
    off = [dataclasses.replace(s, old=s.mu + (s.old - s.mu).clamp(-1, 1)) for s in batch]
    assert_same(stack("gmpo", {}, [("tis", {"level": "sequence"})]), theirs, off, SMALL_PRINT)


@many
@given(batch=batches(dtypes=[torch.float64]))
def test_metrics(batch: list[Seq]) -> None:
    """Effective sample size, mean weight, share capped, share dropped, each from ours as (numerator, denominator) pairs.

    verl multiplies raw weights by 0 outside the mask and adds 1e-8 to the mean before dividing by it, hence the tolerances.
    """
    batch = [*batch, KEPT]
    x = padded(batch)
    tis = evaluate(stack("ppo", {}, [("tis", {})]), batch).metrics
    theirs = correction(x, rollout_is="token", rollout_is_threshold=2.0)[2]
    assert tis["tis/weight_mean"] == pytest.approx(theirs["rollout_is_mean"], rel=1e-6)
    assert tis["tis/capped_share"] == pytest.approx(theirs["rollout_is_ratio_fraction_high"], abs=1e-6)
    if tis["tis/weight_mean"] > 1e-3:
        effective = tis["tis/weight_mean"] ** 2 / tis["tis/weight_square_mean"]
        assert effective == pytest.approx(theirs["rollout_is_eff_sample_size"], rel=1e-4)
    mis = evaluate(stack("ppo", {}, [("icepop", {})]), batch).metrics
    theirs = correction(x, rollout_is="token", rollout_is_threshold="0.5_5.0")[2]
    assert 1 - mis["icepop/kept_share"] == pytest.approx(theirs["rollout_is_oob_ratio"], abs=1e-6)
    trm = evaluate(stack("ppo", {}, [("trm", {"criterion": "max", "max_threshold": 0.0507, "pair": "old/mu"})]), batch).metrics
    theirs = correction(x, rollout_rs="seq_max_k2", rollout_rs_threshold=0.0507)[2]
    assert 1 - trm["trm/kept_share"] == pytest.approx(theirs["rollout_rs_masked_fraction"], abs=1e-6)


@many
@given(batch=batches(dtypes=[torch.float64], far=9.0))
def test_diagnostics(batch: list[Seq]) -> None:
    """kl, k3_kl, chi2_token and chi2_seq of verl from `estimators` and `segments`."""
    tokens = pack(batch, [s.logp for s in batch])
    gap_T = tokens.detached_log_ratio("old/mu")
    theirs = correction(padded(batch))[2]

    def average(x_T: torch.Tensor) -> float:
        top, below = tokens.average(x_T)
        return float(top / below)

    close = {"rel": 1e-6, "abs": 1e-6}
    assert average(estimators.k1(gap_T)) == pytest.approx(theirs["kl"], **close)
    assert average(estimators.k3(gap_T)) == pytest.approx(theirs["k3_kl"], **close)
    assert average((2 * gap_T).exp()) - 1 == pytest.approx(theirs["chi2_token"], **close)
    product_S = tokens.segments.sum(gap_T).clamp(-20, 20)
    assert float((2 * product_S).exp().mean()) - 1 == pytest.approx(theirs["chi2_seq"], **close)
    assert float(tokens.segments.mean(gap_T).mean()) == pytest.approx(-theirs["log_ppl_diff"], **close)
