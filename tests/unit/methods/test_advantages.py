"""Group, GAE and step advantages, and what a critic is trained with; numbers by hand."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_rl.methods.gae import gae, moments, reward_at_end, whiten
from megatron_rl.methods.group import GroupConfig, group_advantages
from megatron_rl.methods.objective import Denominators, reduce_loss
from megatron_rl.methods.segments import LocalSegments
from megatron_rl.methods.step_advantage import monte_carlo_value, spread_steps, step_advantages, step_starts
from megatron_rl.methods.value_loss import explained_variance, value_loss, value_of

from .mdp import random_tree

REWARDS, GROUPS = [1.0, 0.5, 0.0, 0.5, 0.0, 3.0], ["a", "b", "a", "b", "a", "c"]


def test_group_advantages() -> None:
    """Rewards 1, 0, 0 with mean 1/3 and population deviation sqrt(2)/3 give sqrt(2) and -1/sqrt(2) twice; the sample's is sqrt(3)/3 and
    gives 2/sqrt(3) and -1/sqrt(3). An all-equal group and a lone member give 0."""
    by_population = [2**0.5, 0, -(2**-0.5), 0, -(2**-0.5), 0]
    by_sample = [2 / 3**0.5, 0, -(3**-0.5), 0, -(3**-0.5), 0]
    assert group_advantages(REWARDS, GROUPS, GroupConfig()) == pytest.approx(by_population, abs=1e-5)
    assert group_advantages(REWARDS, GROUPS, GroupConfig(std="sample")) == pytest.approx(by_sample, abs=1e-5)
    assert group_advantages(REWARDS, GROUPS, GroupConfig(scale_by_std=False)) == pytest.approx([2 / 3, 0, -1 / 3, 0, -1 / 3, 0])


def test_leave_one_out() -> None:
    """1 minus the mean of 0 and 0; 0 minus the mean of 1 and 0, twice."""
    loo = group_advantages(REWARDS, GROUPS, GroupConfig(baseline="leave-one-out", scale_by_std=False))
    assert loo == pytest.approx([1 - 0, 0, 0 - 0.5, 0, 0 - 0.5, 0])


def test_a_flat_group_is_exactly_zero() -> None:
    """The mean of seven times 0.1 is not 0.1 in fp64; over eps that would be a visible advantage."""
    assert group_advantages([0.1] * 7, ["g"] * 7, GroupConfig(eps=0.0)).tolist() == [0.0] * 7


def test_rejected_samples_leave_the_statistics() -> None:
    """Without the rejected 9 and NaN, group a is 1, 0: mean 1/2, population deviation 1/2; b is left with one member: 0."""
    rewards, groups = [1.0, 9.0, 0.0, 5.0, math.nan], ["a", "a", "a", "b", "b"]
    valid = [True, False, True, True, False]
    assert group_advantages(rewards, groups, GroupConfig(eps=0.0), valid).tolist() == [1, 0, -1, 0, 0]
    kept = group_advantages([1.0, 0.0, 5.0], ["a", "a", "b"], GroupConfig(eps=0.0))
    assert kept.tolist() == [1, -1, 0]
    assert group_advantages(rewards, groups, GroupConfig(), [False] * 5).tolist() == [0] * 5


def test_group_errors() -> None:
    with pytest.raises(ValueError, match="rewards: 1 values for 0 groups"):
        group_advantages([1.0], [], GroupConfig())
    with pytest.raises(ValueError, match=r"rewards\[1\]: nan is not finite"):
        group_advantages([1.0, math.nan], ["a", "a"], GroupConfig())


rewards_and_groups = st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abc")), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(rewards_and_groups, st.floats(-3, 3), st.floats(0.5, 4), st.randoms(use_true_random=False))
def test_group_properties(pairs: list[tuple[float, str]], shift: float, scale: float, random) -> None:  # type: ignore[no-untyped-def]
    """Sums to 0 in every group; ignores a shift; follows a permutation; without the deviation it scales with the reward."""
    rewards, groups = [round(r, 3) for r, _ in pairs], [g for _, g in pairs]
    plain = GroupConfig(scale_by_std=False)
    for config in (GroupConfig(), plain, GroupConfig(baseline="leave-one-out", std="sample")):
        a = group_advantages(rewards, groups, config)
        for name in set(groups):
            assert a[np.array(groups) == name].sum() == pytest.approx(0, abs=1e-4)
        assert group_advantages([r + shift for r in rewards], groups, config) == pytest.approx(a, abs=2e-3)
        order = list(range(len(rewards)))
        random.shuffle(order)
        assert group_advantages([rewards[i] for i in order], [groups[i] for i in order], config) == pytest.approx(a[order], abs=1e-5)
    scaled = group_advantages([scale * r for r in rewards], groups, plain)
    assert scaled == pytest.approx(scale * group_advantages(rewards, groups, plain), abs=1e-4)


MASK = np.array([False, True, False, True, True])
VALUES = np.array([9.0, 0.5, np.nan, 0.25, 0.75])


def test_gae_by_hand() -> None:
    """gamma 0.9, lam 0.8, rewards 0, 0, 1, values 0.5, 0.25, 0.75: deltas -0.275, 0.425, 0.25, each trace 0.72 of the next.
    The prompt and the tool token between are no time steps."""
    advantages, returns = gae(reward_at_end(MASK, 1.0), VALUES, MASK, 0.9, 0.8)
    assert advantages == pytest.approx([0, 0.1606, 0, 0.605, 0.25], abs=1e-6)
    assert returns == pytest.approx([0, 0.6606, 0, 0.855, 1.0], abs=1e-6)
    assert advantages.dtype == returns.dtype == np.float32


def test_gae_limits() -> None:
    """lam = 1, gamma = 1: return minus value. lam = 0: the temporal difference. No loss token: nothing."""
    rewards = np.array([0.0, 0.5, np.nan, 0.0, 1.0])
    advantages, returns = gae(rewards, VALUES, MASK, 1.0, 1.0)
    assert returns == pytest.approx([0, 1.5, 0, 1.0, 1.0])
    assert advantages == pytest.approx([0, 1.0, 0, 0.75, 0.25])
    assert gae(rewards, VALUES, MASK, 1.0, 0.0)[0] == pytest.approx([0, 0.25, 0, 0.5, 0.25])
    assert gae(rewards, VALUES, MASK, 0.0, 0.7)[0] == pytest.approx([0, 0, 0, -0.25, 0.25])
    none = np.zeros(5, dtype=bool)
    assert [x.tolist() for x in gae(reward_at_end(none, 1.0), VALUES, none, 1.0, 1.0)] == [[0.0] * 5] * 2


episodes = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(episodes, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_written_sum_over_loss_tokens(episode: list[tuple[float, float, bool]], gamma: float, lam: float) -> None:
    """The double sum of the definition over the loss tokens alone; whatever stands at the others, NaN included, has no part in it."""
    mask = np.array([m for *_, m in episode])
    rewards = np.array([r if m else np.nan for r, _, m in episode])
    values = np.array([v if m else np.inf for _, v, m in episode])
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    r, v = rewards[mask], np.append(values[mask], 0.0)
    n = len(r)
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    assert advantages[mask] == pytest.approx(expected, abs=1e-5)
    assert returns[mask] == pytest.approx([a + x for a, x in zip(expected, v, strict=False)], abs=1e-5)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.parametrize("seed", range(4))
def test_exact_values_make_gae_unbiased_for_every_lam(seed: int) -> None:
    """On a tree, with V = E_mu[R | prefix], the expected advantage of a path's token over its continuations is A^mu, whatever lam."""
    tree = random_tree(seed, 3, 4)
    values = np.stack([tree.return_to_go(tree.mu, t).numpy() for t in range(4)], axis=1)
    mask = np.ones(4, dtype=bool)
    exact = tree.advantage(tree.mu)
    for lam in (0.0, 0.6, 1.0):
        found = torch.tensor(
            np.stack([gae(reward_at_end(mask, float(r)), v, mask, 1.0, lam)[0] for r, v in zip(tree.reward_P, values, strict=True)])
        ).double()
        for t in range(4):
            # E[ advantage at t | first t + 1 tokens ]: over the tokens that follow, under mu
            weight_P = tree.logp(tree.mu)[:, t + 1 :].sum(1).exp()
            mean = (weight_P * found[:, t]).reshape(3 ** (t + 1), -1).sum(1)[tree.context(t + 1)]
            torch.testing.assert_close(mean, exact[:, t], rtol=0, atol=1e-6)


def test_whitening_is_global() -> None:
    """1, 2, 3 and 6 have mean 3 and sample variance 14/3, however they are spread over leaders; the masked 100 does not count."""
    one, two = np.array([1.0, 100.0, 2.0, 3.0], np.float32), np.array([6.0], np.float32)
    masks = [np.array([True, False, True, True]), np.array([True])]
    totals = moments([one], masks[:1]) + moments([two], masks[1:])
    assert totals.tolist() == [4, 12, 50]
    scale = math.sqrt(14 / 3)
    whitened = whiten([one, two], masks, totals)
    assert whitened[0] == pytest.approx([-2 / scale, 0, -1 / scale, 0])
    assert whitened[1] == pytest.approx([3 / scale])
    assert whiten([two], masks[1:], moments([two], masks[1:]))[0].tolist() == [0.0]


def test_steps() -> None:
    """Values 0.5, 0.75, 0.25 before three steps and reward 1: differences 0.25, -0.5, 0.75, which add up to 1 - 0.5."""
    turns = np.array([-1, -1, 0, 0, -1, 1, 2, 2], dtype=np.int32)
    assert step_starts(turns) == [2, 5, 6]
    advantages = step_advantages([0.5, 0.75, 0.25], 1.0)
    assert advantages.tolist() == [0.25, -0.5, 0.75]
    assert spread_steps(advantages, turns).tolist() == [0, 0, 0.25, 0.25, 0, -0.5, 0.75, 0.75]
    assert monte_carlo_value([1.0, 0.0, 0.0, 1.0]) == 0.5
    assert step_starts(np.array([-1, -1], dtype=np.int32)) == []
    assert step_advantages([0.5], 0.0).tolist() == [-0.5]


def test_step_errors() -> None:
    with pytest.raises(ValueError, match="turns: the steps are"):
        step_starts(np.array([-1, 0, 2], dtype=np.int32))
    with pytest.raises(ValueError, match="turns: the steps are"):
        step_starts(np.array([1, 0], dtype=np.int32))
    with pytest.raises(ValueError, match="rewards: no completion"):
        monte_carlo_value([])


def test_step_advantages_with_exact_values_are_those_of_the_tree() -> None:
    """Each token a step: V before it exact under mu, the last value the reward."""
    tree = random_tree(5, 3, 4)
    values = np.stack([tree.return_to_go(tree.mu, t).numpy() for t in range(4)], axis=1)
    found = np.stack([step_advantages(v, float(r)) for v, r in zip(values, tree.reward_P, strict=True)])
    torch.testing.assert_close(torch.tensor(found), tree.advantage(tree.mu))


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_square_value_loss() -> None:
    """Returns 2, 0, 2 for value 1 that was 0, clip 0.5, so the clipped value is 0.5. Towards 2: max(1, 1.5^2)/2 without a gradient;
    towards 0: max(1, 0.5^2)/2 with gradient 1. The third value has not moved (it was 1): 1/2 with gradient -1. The fourth is masked."""
    output = tensor(1.0, 1.0, 1.0, math.nan).requires_grad_()
    mask = torch.tensor([True, True, True, False])
    answer = value_loss(output, tensor(0, 0, 1, math.inf), tensor(2, 0, 2, math.nan), mask, "square", 0.5)
    assert answer.loss_T.tolist() == [1.125, 0.5, 0.5, 0]
    assert torch.autograd.grad(answer.loss_T.sum(), output)[0].tolist() == [0, 1, -1, 0]
    assert [float(x) for x in answer.metrics["clip_share"]] == [1, 3]
    plain = value_loss(output, None, tensor(2, 0, 2, math.nan), mask, "square")
    assert plain.loss_T.tolist() == [0.5, 0.5, 0.5, 0]


def test_cross_entropy_value_loss() -> None:
    """Logit 0 means 1/2: ln 2 whatever the target, gradient 1/2 - target. It is smallest where the probability is the target."""
    logits = tensor(0, 0, math.log(3), math.nan).requires_grad_()
    mask = torch.tensor([True, True, True, False])
    answer = value_loss(logits, None, tensor(0.25, 1, 0.75, math.nan), mask, "bce")
    assert answer.loss_T[:2].tolist() == pytest.approx([math.log(2)] * 2)
    assert torch.autograd.grad(answer.loss_T.sum(), logits)[0].tolist() == pytest.approx([0.25, -0.5, 0, 0])
    assert value_of(tensor(math.log(3)), "bce").item() == pytest.approx(0.75)
    assert value_of(tensor(3.0), "square").item() == 3


def test_explained_variance_adds_up_over_micro_batches() -> None:
    """Returns 0, 2, 4, 6 (variance 5), residuals 0, 1, 0, 1 (variance 1/4): 0.95. A critic that predicts a constant explains nothing."""
    returns, values = tensor(0, 2, 4, 6), tensor(0, 1, 4, 5)
    mask = torch.ones(2, dtype=torch.bool)
    parts = [value_loss(values[i : i + 2], None, returns[i : i + 2], mask, "square").metrics for i in (0, 2)]
    reduced = {name: float(sum(p[name][0] for p in parts) / sum(p[name][1] for p in parts)) for name in parts[0]}
    assert explained_variance(reduced) == pytest.approx(0.95)
    whole = torch.ones(4, dtype=torch.bool)
    constant = {k: float(n / d) for k, (n, d) in value_loss(torch.full_like(returns, 3.0), None, returns, whole, "square").metrics.items()}
    assert explained_variance(constant) == pytest.approx(0)
    flat = {k: float(n / d) for k, (n, d) in value_loss(values, None, torch.ones_like(returns), whole, "square").metrics.items()}
    assert math.isnan(explained_variance(flat))


@pytest.mark.parametrize("form", ["square", "bce"])
def test_value_loss_does_not_see_padding_or_the_split(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    output, old, returns = torch.rand(3, 8, generator=generator)
    mask = torch.rand(8, generator=generator) < 0.7

    def gradient(garbage: float, split: list[slice]) -> torch.Tensor:
        x = torch.where(mask, output, garbage).requires_grad_()
        over = Denominators(float(mask.sum()), 1.0, 1.0)
        total = torch.zeros(())
        for part in split:
            answer = value_loss(x[part], old[part], torch.where(mask, returns, garbage)[part], mask[part], form, 0.1)  # type: ignore[arg-type]
            segments = LocalSegments(torch.zeros(int(mask[part].numel()), dtype=torch.int64), mask[part], 1)
            total = total + reduce_loss(answer.loss_T, segments, "token-mean", over)
        return torch.autograd.grad(total, x)[0]

    reference = gradient(0.0, [slice(0, 8)])
    assert (reference[~mask] == 0).all()
    for garbage in (math.nan, math.inf, -1e30):
        torch.testing.assert_close(gradient(garbage, [slice(0, 3), slice(3, 8)]), reference)
