"""Quantiles from histograms, the uniforms that belong to a token, and two statements that hold for samples only."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.methods.histogram import unit_histogram, unit_quantile
from megatron_rl.methods.sis import accepted_T
from megatron_rl.methods.uniform import token_uniforms

from .packs import evaluate, make, pack, stack


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
