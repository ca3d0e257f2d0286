"""Bounds from sampled tokens: the estimates against exact ones of a tree MDP, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.methods import bounds


def test_two_sequences_by_hand() -> None:
    """d = (log 2, 0) and (0): |rho - 1| / 2 is 1/2, 0 and 0; k3 of log 2 is 1 - log 2; the second sequence has no token at t = 2."""
    found = bounds.sampled([np.array([np.log(2.0), 0.0]), np.array([0.0])])
    assert found.horizon == 2
    assert found.tv_mean == pytest.approx([0.25, 0.0])
    assert found.tv_max == pytest.approx(0.5)
    assert found.kl_max == pytest.approx(np.log(2.0) ** 2 / 2)
    assert found.kl_sequence == pytest.approx((1 - np.log(2.0)) / 2)
    assert found.tv_sequence == pytest.approx(0.25)


def test_unbiased_where_it_says_so() -> None:
    """One context, mu = (0.7, 0.3), theta = (0.5, 0.5): TV = 0.2 and KL(mu || theta) by their definitions."""
    mu, theta = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    drawn = np.random.default_rng(0).choice(2, 200_000, p=mu)
    found = bounds.sampled([np.array([x]) for x in np.log(theta / mu)[drawn]])
    assert found.tv_mean == pytest.approx([0.2], abs=2e-3)  # the estimate's standard error is 4e-4
    assert found.kl_sequence == pytest.approx(float((mu * np.log(mu / theta)).sum()), abs=2e-3)


def test_equal_policies_bound_nothing() -> None:
    assert set(bounds.all_bounds(bounds.sampled([np.zeros(3), np.zeros(1)])).values()) == {0.0}


def test_no_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="log_ratios"):
        bounds.sampled([np.zeros(0)])
