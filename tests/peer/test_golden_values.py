"""Golden values from other frameworks' own tests and guides, for what tests/unit/methods lacks. None of them need be installed."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.methods import estimators

from .batches import one
from .ours import Seq, evaluate, pack, stack


def with_ratios(*rows: list[float]) -> list[Seq]:
    """Sequences whose tokens have these old/mu; theta = old, A = 1."""
    old = [[-1.0 + math.log(v) for v in row] for row in rows]
    return [one(x, x, [-1.0] * len(x)) for x in old]


def test_verl_icepop_statistics() -> None:
    """Ratios 0.4, 0.8, 6 in [0.5, 5] leave weights 0, 0.8, 0: two of three out of bounds, deviation 0.3771236, ESS 1/3 of the tokens."""
    outcome = evaluate(stack("policy_gradient", {"weight": "none"}, [("icepop", {})], "seq-mean-token-sum"), with_ratios([0.4, 0.8, 6.0]))
    weight = -outcome.grads[0]
    assert weight.tolist() == pytest.approx([0, 0.8, 0])
    assert 1 - outcome.metrics["icepop/kept_share"] == pytest.approx(2 / 3)
    assert outcome.metrics["icepop/weight_mean"] == pytest.approx(0.8 / 3)
    assert weight.std(correction=0).item() == pytest.approx(0.3771236, abs=1e-7)
    assert (weight.mean() ** 2 / weight.square().mean()).item() == pytest.approx(1 / 3)


def test_verl_share_of_sequences_above_the_threshold() -> None:
    """Raw weights [1, 6] and [0.9, 1.1] have means 3.5 and 1: half the sequences exceed 2, though no capped weight could."""
    batch = with_ratios([1.0, 6.0], [0.9, 1.1])
    tokens = pack(batch, [s.logp for s in batch])
    mean_S = tokens.segments.mean(tokens.detached_log_ratio("old/mu").exp())
    assert mean_S.tolist() == pytest.approx([3.5, 1.0])
    assert (mean_S > 2).double().mean() == 0.5
    capped = evaluate(stack("ppo", {}, [("tis", {"cap": 2.0})]), batch).metrics["tis/capped_share"]
    assert capped == 0.25  # one token of four


def test_areal_geometric_weight() -> None:
    """Proximal log-probs 0, 0.5, 1 above the behaviour's: every token gets e^0.5, and the packed neighbour keeps its own e^0.3."""
    batch = with_ratios([1.0, math.exp(0.5), math.exp(1.0)], [math.exp(0.6), 1.0])
    outcome = evaluate(
        stack("policy_gradient", {"weight": "none"}, [("tis", {"level": "geometric", "cap": 9.0})], "seq-mean-token-sum"), batch
    )
    assert (-2 * outcome.grads[0]).tolist() == pytest.approx([math.exp(0.5)] * 3)
    assert (-2 * outcome.grads[1]).tolist() == pytest.approx([math.exp(0.3)] * 2)


def test_areal_mean_of_k2() -> None:
    """Log-ratios 0, 1, 0: k2 is 0, 1/2, 0, its mean 1/6, below a bound of 0.5; so is, just, its maximum, which `trm` looks at."""
    batch = with_ratios([1.0, math.e, 1.0])
    tokens = pack(batch, [s.logp for s in batch])
    assert tokens.segments.mean(estimators.k2(tokens.detached_log_ratio("old/mu"))).item() == pytest.approx(1 / 6)
    for threshold, kept in ((0.5 + 1e-9, 1.0), (0.5 - 1e-9, 0.0)):
        trm = ("trm", {"criterion": "max", "max_threshold": threshold, "pair": "old/mu"})
        assert evaluate(stack("ppo", {}, [trm]), batch).metrics["trm/kept_share"] == kept


def test_nemo_lopsided_k3() -> None:
    """log mu = -5, log pi = -15: k3 of pi/mu is e^-10 - 1 + 10 = 9.00005, of mu/pi e^10 - 1 - 10 = 22015.47."""
    d = torch.tensor([-10.0], dtype=torch.float64)
    assert estimators.k3(d).item() == pytest.approx(9.0000454, abs=1e-7)
    assert estimators.k3(-d).item() == pytest.approx(22015.4658, abs=1e-4)


def test_skyrl_sequence_weight_under_a_mask() -> None:
    """old -1, -1.5, -0.5 against -1.5, -1, -1.5, the middle one a tool's: e^(0.5 + 1) = 4.4817 on the other two."""
    s = one([-1.0, -1.5, -0.5], [-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], mask=[True, False, True])
    tis = ("tis", {"level": "sequence", "cap": 5.0})
    outcome = evaluate(stack("policy_gradient", {"weight": "none"}, [tis], "seq-mean-token-sum"), [s])
    assert (-outcome.grads[0]).tolist() == pytest.approx([math.exp(1.5), 0, math.exp(1.5)])
