"""Advantages, reward shaping, learning-rate schedules, the token-owned uniforms, and two statistical statements."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron_rl.methods.advantages import group_advantages
from megatron_rl.methods.histogram import unit_histogram, unit_quantile
from megatron_rl.methods.schedules import (
    LengthDecayConfig,
    LengthDecayState,
    effective_share,
    length_decay,
    vcpo_factor,
    warmup_factor,
)
from megatron_rl.methods.shaping import informative_groups, kl_in_reward, overlong_penalty
from megatron_rl.methods.sis import accepted_T
from megatron_rl.methods.uniform import token_uniforms

from .packs import evaluate, make, pack, stack


def test_group_advantages() -> None:
    """Rewards 1, 0, 0 with mean 1/3 and population deviation sqrt(2)/3 give sqrt(2) and -1/sqrt(2) twice; an all-equal group and a
    lone member give 0."""
    rewards, groups = [1.0, 0.5, 0.0, 0.5, 0.0, 3.0], ["a", "b", "a", "b", "a", "c"]
    assert group_advantages(rewards, groups) == pytest.approx([math.sqrt(2), 0, -math.sqrt(0.5), 0, -math.sqrt(0.5), 0], abs=1e-5)
    assert group_advantages(rewards, groups, scale_by_std=False) == pytest.approx([2 / 3, 0, -1 / 3, 0, -1 / 3, 0])
    loo = group_advantages(rewards, groups, baseline="leave-one-out", scale_by_std=False)
    assert loo == pytest.approx([1 - 0, 0, 0 - 0.5, 0, 0 - 0.5, 0])
    with pytest.raises(ValueError, match="rewards"):
        group_advantages([1.0], [])


def test_overlong_penalty() -> None:
    """DAPO's numbers: free to 16384, half-way through the buffer -0.5, -1 from 20480 on."""
    assert overlong_penalty([10, 16384, 18432, 20480, 30000], 20480, 4096).tolist() == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="buffer: 0"):
        overlong_penalty([1], 10, 0)


def test_informative_groups() -> None:
    assert informative_groups([1, 0, 1, 1], ["a", "a", "b", "b"]).tolist() == [True, True, False, False]
    assert informative_groups([], []).tolist() == []
    with pytest.raises(ValueError, match="rewards"):
        informative_groups([1.0], [])


def test_kl_in_reward() -> None:
    """d = log ref - log pi = -0.5: k1 = 0.5, k2 = 0.125, k3 = e^-0.5 - 0.5; the masked token, though NaN, adds 0."""
    logp, reference = np.array([-1.0, np.nan], np.float32), np.array([-1.5, -1.0], np.float32)
    mask = np.array([True, False])
    for estimator, expected in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)):
        assert kl_in_reward(logp, reference, mask, 0.1, estimator) == pytest.approx([-0.1 * expected, 0])  # type: ignore[arg-type]


def test_warmup() -> None:
    assert [warmup_factor(s, 4) for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_factor(0, 0) == 1


def test_length_decay_triggers_once_and_floors() -> None:
    """Statement 16: mean length 1000 until step 109, 3500 from 110 on, baseline 1000, so the surge is at 110; period 1.8 x 110 = 198:
    halved at steps 198, 396 and 594, then 0.1 instead of 0.0625 from 792 on."""
    state, factors = LengthDecayState(), []
    for step in range(1, 1001):
        state, factor = length_decay(state, 1000.0 if step < 110 else 3500.0, LengthDecayConfig())
        state = LengthDecayState(**dataclasses.asdict(state))  # as a checkpoint would restore it
        factors.append(factor)
    assert state.surge_step == 110
    changes = {i + 1: b for i, (a, b) in enumerate(zip([1.0, *factors], factors, strict=False)) if a != b}
    assert changes == {198: 0.5, 396: 0.25, 594: 0.125, 792: 0.1}


def test_length_decay_ignores_the_baseline_window_and_small_growth() -> None:
    state = LengthDecayState()
    for step in range(1, 400):
        state, factor = length_decay(state, 5000.0 if step == 20 else 1000.0 + step, LengthDecayConfig())
        assert factor == 1.0
    assert state.surge_step is None


@pytest.mark.parametrize(("name", "value"), [("surge", 1.0), ("floor", 0.0), ("period", -1.0), ("baseline_steps", 0)])
def test_length_decay_errors(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        LengthDecayConfig(**{name: value})  # type: ignore[arg-type]


def test_effective_share_and_vcpo() -> None:
    """Weights 1, 1 use all; 1, 3 use (4)^2 / (2 * 10) = 0.8; a factor e^1000 on all changes nothing."""
    assert effective_share([0.0, 0.0]) == 1
    assert effective_share([1000.0, 1000.0 + math.log(3)]) == pytest.approx(0.8)
    assert vcpo_factor(0.8, 0.9) == pytest.approx(math.sqrt(0.8 / 0.9))
    assert vcpo_factor(1.0, 0.9) == 1
    with pytest.raises(ValueError, match="log_weights"):
        effective_share([])
    with pytest.raises(ValueError, match="reference_share: 0"):
        vcpo_factor(0.5, 0)


def test_quantile_from_a_histogram() -> None:
    """Exact to a bin of 1/4096, over micro-batches, against sorting."""
    x = torch.rand(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
    mask = torch.ones(1001, dtype=torch.bool)
    counts = unit_histogram(x[:400], mask[:400]) + unit_histogram(x[400:], mask[400:])
    assert float(unit_quantile(counts, 0.9)) == pytest.approx(float(x.quantile(0.9)), abs=1.5 / 4096)
    assert float(unit_quantile(torch.zeros(4096, dtype=torch.float64), 0.9)) == 0


def test_uniforms_belong_to_the_token() -> None:
    """The same for the same (seed, sample, position) in any order; different seeds, samples and swapped roles give others."""
    sample, position = torch.arange(200).repeat_interleave(50), torch.arange(50).repeat(200)
    u = token_uniforms(sample, position, 7)
    order = torch.randperm(10000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(token_uniforms(sample[order], position[order], 7), u[order])
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert not torch.equal(token_uniforms(sample, position, 8), u)
    assert not torch.equal(token_uniforms(position, sample, 7), u)
    # 10 bins of 1000 expected: chi-square with 9 degrees of freedom is below 27.9 with probability 0.999
    counts = torch.histc(u, 10, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 27.9
    assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.04  # 4 / sqrt(10000)


def test_sis_accepts_tokens_as_if_theta_had_drawn_them() -> None:
    """Statement 8: with K = V the accepted tokens follow theta (chi-square, 3 degrees of freedom) and a share 1 / M is accepted."""
    theta = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    old = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    n = 40000
    drawn = torch.multinomial(old, n, replacement=True, generator=torch.Generator().manual_seed(2))
    candidates = {"top_theta": theta.log().repeat(n, 1), "top_old": old.log().repeat(n, 1), "top_mu": old.log().repeat(n, 1)}
    uniform = token_uniforms(torch.zeros(n, dtype=torch.int64), torch.arange(n), 3).double()
    s = make(theta[drawn].log(), old[drawn].log(), has_label=torch.ones(n, dtype=torch.bool), uniform=uniform, **candidates)
    accepted = accepted_T(pack([s], [s.logp], None, 0, 0.0))
    envelope = float((theta / old).max())
    share = float(accepted.double().mean())
    assert share == pytest.approx(1 / envelope, abs=4 * math.sqrt(0.25 / n))
    counts = torch.bincount(drawn[accepted], minlength=4).double()
    expected = theta * accepted.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 0.999 quantile


def test_trm_max_rejects_by_length_and_geometric_tests_do_not() -> None:
    """Statement 11: each token violates independently with probability p: TRM-Max accepts (1 - p)^T, whatever the size of the violation."""
    p, lengths, n = 0.02, (5, 50), 600
    generator = torch.Generator().manual_seed(4)
    for length in lengths:
        batch = []
        for _ in range(n):
            mu = torch.full((length,), -1.0, dtype=torch.float64)
            violation = torch.rand(length, generator=generator) < p
            batch.append(make(mu - 0.5 * violation, mu, mu))
        outcome = evaluate(stack("policy_gradient", {}, [("trm", {"criterion": "max"}), ("geo_rs", {"pair": "theta/mu"})]), batch)
        expected = (1 - p) ** length
        assert outcome.metrics["trm/kept_share"] == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / n))
        assert outcome.metrics["geo_rs/kept_share"] == 1
