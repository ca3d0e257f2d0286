"""The identities of papers.md 2 and the bounds of 3.2, 4 and 5, by exact enumeration of small trees in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_rl.methods import bounds, estimators
from megatron_rl.methods.bounds import Divergences
from megatron_rl.methods.cppo import CPPOConfig, allowance_T, position_weight_T
from megatron_rl.methods.objective import Denominators, Tokens
from megatron_rl.methods.segments import LocalSegments

from .mdp import Tree, kl, random_tree, tv
from .packs import stack

TREES = [random_tree(seed, v, t, distance) for seed, (v, t, distance) in enumerate([(3, 4, 0.5), (4, 3, 1.0), (3, 5, 0.2), (5, 3, 0.05)])]
every_tree = pytest.mark.parametrize("tree", TREES, ids=lambda t: f"V{t.vocabulary}T{t.horizon}")


def close(a: Tensor | float, b: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def packed(tree: Tree, logp_PT: Tensor, advantages_PT: Tensor) -> Tokens:
    """All paths as one micro-batch, with old = mu."""
    paths, horizon = logp_PT.shape
    segments = LocalSegments(torch.arange(paths).repeat_interleave(horizon), torch.ones(paths * horizon, dtype=torch.bool), paths)
    mu_T = tree.logp(tree.mu).reshape(-1)
    return Tokens.of(logp_PT.reshape(-1), mu_T, mu_T, advantages_PT.reshape(-1), segments)


def gain(tree: Tree) -> Tensor:
    return tree.value(tree.pi) - tree.value(tree.mu)


def first_order(tree: Tree) -> Tensor:
    """L' of papers.md 2.3."""
    return tree.under(tree.mu, tree.reward_P * (tree.log_rho.exp() - 1).sum(1))


@every_tree
def test_performance_difference(tree: Tree) -> None:
    """2.1: prefix weights on the advantages of mu give the return difference exactly."""
    weight_PT = tree.log_rho.cumsum(1).exp()
    close(tree.under(tree.mu, (weight_PT * tree.advantage(tree.mu)).sum(1)), gain(tree))


@every_tree
def test_suffix_form_first_order_form_and_error(tree: Tree) -> None:
    """2.2, 2.3, 2.4."""
    rho_PT = tree.log_rho.exp()
    after_PT = (tree.log_rho.sum(1, keepdim=True) - tree.log_rho.cumsum(1)).exp()
    close(tree.under(tree.mu, tree.reward_P * ((rho_PT - 1) * after_PT).sum(1)), gain(tree))
    close(tree.under(tree.mu, (rho_PT * tree.advantage(tree.mu)).sum(1)), first_order(tree))
    error = tree.under(tree.mu, tree.reward_P * ((rho_PT - 1) * (1 - after_PT)).sum(1))
    close(first_order(tree) - error, gain(tree))


@every_tree
def test_nfpo_interpolates_between_first_order_and_exact(tree: Tree) -> None:
    """2.5 through the method itself: -loss with A = R, summed over paths weighted by mu, is L_N; N = 1 is L', N = T the exact gain."""
    paths, horizon = tree.log_rho.shape
    weight_P = tree.logp(tree.mu).sum(1).exp()
    advantages_PT = (tree.reward_P * weight_P)[:, None].expand(paths, horizon)
    tokens = packed(tree, tree.logp(tree.pi), advantages_PT)

    def value(steps: int) -> float:
        built = stack("nfpo", {"steps": steps, "threshold": 2.0, "trace_cap": 1e9}, aggregation="seq-mean-token-sum")
        return -float(built.loss(tokens, Denominators(1.0, 1.0, 1.0))[0])

    close(value(1), first_order(tree))
    close(value(horizon), gain(tree))
    rho_PT = tree.log_rho.exp()
    two = (rho_PT - 1) * torch.cat([rho_PT[:, 1:], torch.ones(paths, 1)], dim=1)
    close(value(2), tree.under(tree.mu, tree.reward_P * two.sum(1)))


@every_tree
def test_kl_chain_and_prefix_generators(tree: Tree) -> None:
    """2.6 and statement 6: the generators that EPIC's window is made of have the prefix KLs as expectations, in both directions."""
    log_weight_PT = tree.log_rho.cumsum(1)
    forward = tree.under(tree.mu, tree.per_context(kl)).cumsum(0)
    backward = tree.under(tree.pi, tree.per_context(lambda mu, pi: kl(pi, mu))).cumsum(0)
    close(tree.under(tree.mu, estimators.k3(log_weight_PT)), forward)
    close(tree.under(tree.mu, estimators.reverse_kl(log_weight_PT)), backward)


@every_tree
def test_policy_gradient_with_prefix_weights(tree: Tree) -> None:
    """2.7: grad J(pi) = E_mu[ sum_t W_t A^pi_t grad log pi_t ]; EPIC with an open window computes it from A^pi."""
    logits = [p.log().clone().requires_grad_() for p in tree.pi]
    exact = torch.autograd.grad(tree.value([x.softmax(1) for x in logits]), logits)
    logp_PT = tree.logp([x.softmax(1) for x in logits])
    weight_P = tree.logp(tree.mu).sum(1).exp()
    tokens = packed(tree, logp_PT, weight_P[:, None] * tree.advantage(tree.pi))
    built = stack("epic", {"delta": 1e12}, aggregation="seq-mean-token-sum")
    loss, _ = built.loss(tokens, Denominators(1.0, 1.0, 1.0))
    for a, b in zip(torch.autograd.grad(-loss, logits), exact, strict=True):
        close(a, b)


@every_tree
def test_sequence_weights_make_the_score_gradient_exact(tree: Tree) -> None:
    """2.7, the other half: with the realised return the weight has to be the whole sequence's (tis, level sequence, nothing capped)."""
    logits = [p.log().clone().requires_grad_() for p in tree.pi]
    exact = torch.autograd.grad(tree.value([x.softmax(1) for x in logits]), logits)
    logp_PT = tree.logp([x.softmax(1) for x in logits])
    paths, horizon = logp_PT.shape
    reward_PT = (tree.logp(tree.mu).sum(1).exp() * tree.reward_P)[:, None].expand(paths, horizon)
    tokens = packed(tree, logp_PT, reward_PT)
    sequence = ("tis", {"level": "sequence", "pair": "theta/mu", "cap": 1e9})
    built = stack("policy_gradient", {"weight": "none"}, [sequence], aggregation="seq-mean-token-sum")
    for a, b in zip(torch.autograd.grad(-built.loss(tokens, Denominators(1.0, 1.0, 1.0))[0], logits), exact, strict=True):
        close(a, b)


@every_tree
def test_martingales_and_sample_estimators(tree: Tree) -> None:
    """2.8, statement 5: E rho = E W = 1, E k1 = E k3 = KL(mu || pi), E |rho - 1| = 2 TV, E reverse = KL(pi || mu), in every context."""
    ones = torch.ones(tree.horizon, dtype=torch.float64)
    close(tree.under(tree.mu, tree.log_rho.exp()), ones)
    close(tree.under(tree.mu, tree.log_rho.cumsum(1).exp()), ones)
    for t in range(tree.horizon):
        mu, d = tree.mu[t], (tree.pi[t] / tree.mu[t]).log()
        close((mu * estimators.k1(d)).sum(1), kl(mu, tree.pi[t]))
        close((mu * estimators.k3(d)).sum(1), kl(mu, tree.pi[t]))
        close((mu * estimators.reverse_kl(d)).sum(1), kl(tree.pi[t], mu))
        close((mu * (d.exp() - 1).abs()).sum(1), 2 * tv(mu, tree.pi[t]))


def divergences(tree: Tree) -> Divergences:
    """Exact inputs of the bounds."""
    tv_PT, kl_PT = tree.per_context(tv), tree.per_context(kl)
    law = [tree.logp(p).sum(1).exp() for p in (tree.mu, tree.pi)]
    return Divergences(
        horizon=tree.horizon,
        tv_max=float(tv_PT.max()),
        kl_max=float(kl_PT.max()),
        kl_sequence=float(tree.under(tree.mu, kl_PT).sum()),
        tv_sequence=float((law[0] - law[1]).abs().sum() / 2),
        tv_mean=tree.under(tree.mu, tv_PT).tolist(),
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_bound_holds(seed: int) -> None:
    """Statement 2 and the DPPO half of 3, on trees from nearly equal to far apart."""
    vocabulary, horizon = [(3, 4), (4, 3), (3, 5), (2, 6)][seed % 4]
    tree = random_tree(100 + seed, vocabulary, horizon, distance=[0.02, 0.1, 0.3, 1.0, 2.5][seed % 5])
    d = divergences(tree)
    error = abs(float(gain(tree) - first_order(tree)))
    every = bounds.all_bounds(d)
    assert len(every) == 9
    for name, bound in every.items():
        assert error <= bound + 1e-12, name
    assert every["adaptive"] <= min(every["adaptive_kl"], every["adaptive_tv"]) + 1e-12
    name, value = bounds.best(d)
    assert value == min(every.values()) == every[name]
    assert error <= bounds.dppo(d.horizon, 1.0, d.tv_max, sum(d.tv_mean or [])) + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_cppo_bounds_hold_where_its_rule_is_kept(seed: int) -> None:
    """Statement 3: a budget wide enough that every token of every path obeys w_t D_t <= c_t, D the exact TV of its context."""
    tree = random_tree(200 + seed, 3, 4, distance=[0.05, 0.2, 0.6][seed % 3])
    tv_PT = tree.per_context(tv)
    tokens = packed(tree, tree.logp(tree.pi), torch.ones_like(tv_PT))
    weight_T = position_weight_T(tokens, 0.8)
    config = CPPOConfig(threshold=float(tv_PT.max()), budget=float(tv_PT.max()))
    allowed_T = allowance_T(tokens, config, tv_PT.reshape(-1), weight_T)
    assert (weight_T * tv_PT.reshape(-1) <= allowed_T + 1e-12).all()
    limits_PT = (allowed_T / weight_T).reshape(tv_PT.shape)
    error = abs(float(gain(tree) - first_order(tree)))
    assert error <= bounds.cppo(tree.horizon, 1.0, float(limits_PT.max()), config.budget) + 1e-12
    per_position = limits_PT.max(0).values.tolist()
    assert error <= bounds.cppo_suffix(1.0, tree.under(tree.mu, tv_PT).tolist(), per_position) + 1e-12
    # uniform thresholds recover 2 xi T (T-1) delta^2
    uniform = bounds.cppo_suffix(1.0, [0.1] * 6, [0.1] * 6)
    assert uniform == pytest.approx(2 * 6 * 5 * 0.1**2)


def test_reference_table() -> None:
    """papers.md 3.2: T = 4096, delta = 1e-4, KL_seq = 0.01."""
    rows = {
        (7.0710678e-3, 0.070710678): [1677, 113.8, 35.0, 35.0, 8.2, 8.2],
        (5e-3, 0.05): [839, 79.9, 35.0, 24.7, 8.2, 4.1],
    }
    for (epsilon, tv_sequence), expected in rows.items():
        b = bounds.all_bounds(Divergences(4096, epsilon, 1e-4, 0.01, tv_sequence))
        assert len(b) == 6
        names = ["classical", "coupling", "pinsker_marginal_kl", "pinsker_marginal_tv", "mixed_kl", "mixed_tv"]
        # the table rounds to one decimal, the first column to whole numbers
        assert [b[n] for n in names[:1]] == pytest.approx(expected[:1], abs=1)
        assert [b[n] for n in names[1:]] == pytest.approx(expected[1:], abs=0.06)


def test_relations_between_bounds() -> None:
    """Dbar_t = sqrt(delta/2) turns Adaptive-KL into PM-KL, Dbar_t = epsilon Adaptive-TV into Coupling; TV and KL switch inside Adaptive*
    at T - t = delta / (2 epsilon^2)."""
    delta, epsilon, horizon = 2e-3, 0.02, 50
    pinsker = Divergences(horizon, epsilon, delta, 0.1, 0.2, [math.sqrt(delta / 2)] * horizon)
    assert bounds.adaptive_kl(pinsker) == pytest.approx(bounds.pinsker_marginal_kl(pinsker))
    flat = Divergences(horizon, epsilon, delta, 0.1, 0.2, [epsilon] * horizon)
    assert bounds.adaptive_tv(flat) == pytest.approx(bounds.coupling(flat))
    switch = delta / (2 * epsilon**2)  # 2.5: TV is tighter for T - t = 1, 2; KL from 3 on
    by_hand = 4 * epsilon * sum(k * epsilon if k < switch else min(1.0, math.sqrt(k * delta / 2)) for k in range(horizon))
    assert bounds.adaptive(flat) == pytest.approx(by_hand)


@pytest.mark.parametrize("bad", [{"horizon": 0}, {"tv_max": -0.1}, {"tv_mean": [0.1]}])
def test_bad_inputs_are_named(bad: dict) -> None:
    good = {"horizon": 2, "tv_max": 0.1, "kl_max": 0.1, "kl_sequence": 0.1, "tv_sequence": 0.1}
    with pytest.raises(ValueError, match=next(iter(bad))):
        Divergences(**{**good, **bad})


def test_partitions_are_ordered() -> None:
    """Statement 4: binary <= top-K <= exact, and all equal once K covers the vocabulary (V = 2 for binary)."""
    generator = torch.Generator().manual_seed(3)
    vocabulary, rows = 8, 200
    logits = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    mu, pi = logits[0].log_softmax(1), (logits[0] + 0.7 * logits[1]).log_softmax(1)
    label = torch.multinomial(mu.exp(), 1, generator=generator)
    own_mu, own_pi = mu.gather(1, label)[:, 0], pi.gather(1, label)[:, 0]
    previous = {"tv": estimators.binary_tv(own_pi, own_mu), "kl": estimators.binary_kl(own_pi, own_mu)}
    exact = {"tv": estimators.exact_tv(pi, mu), "kl": estimators.exact_kl(pi, mu)}
    for k in (1, 2, 4, 7, 8):
        ids = mu.topk(k, dim=1).indices
        cells = [estimators.partition(own, p.gather(1, ids), (ids == label).any(1)) for own, p in ((own_pi, pi), (own_mu, mu))]
        now = {"tv": estimators.partition_tv(*cells), "kl": estimators.partition_kl(*cells)}
        for name in ("tv", "kl"):
            assert (previous[name] <= now[name] + 1e-6).all(), (name, k)  # 1e-8 guards each logarithm
            assert (now[name] <= exact[name] + 1e-6).all(), (name, k)
        if k > 1:  # from the second on, a finer partition of the same candidates
            previous = now
    torch.testing.assert_close(now["tv"], exact["tv"], rtol=0, atol=1e-12)
    torch.testing.assert_close(now["kl"], exact["kl"], rtol=0, atol=1e-6)  # 8 cells, each off by up to 1e-8 |1 - mu/pi|


def test_sequence_mask_bias_formula() -> None:
    """8.3, statement 18: the bias of seq-MIS is -E_pi[f 1(w > C)], here with f = R and pi the target."""
    tree, cap = TREES[1], 1.3
    weight_P = tree.log_rho.sum(1).exp()
    estimate = tree.under(tree.mu, torch.where(weight_P <= cap, weight_P, 0.0) * tree.reward_P)
    bias = -tree.under(tree.pi, (weight_P > cap).double() * tree.reward_P)
    assert abs(float(bias)) > 1e-3
    close(estimate - tree.value(tree.pi), bias)


def test_self_normalised_bias_shrinks_with_the_batch() -> None:
    """Statement 18: the bias of sum w R / sum w over N samples is O(1/N): exact over all N-tuples of a tiny tree, N = 2, 4 and 6."""
    tree = random_tree(9, 2, 2, 1.5)
    probability_P = tree.logp(tree.mu).sum(1).exp()
    weight_P = tree.log_rho.sum(1).exp()
    truth = float(tree.value(tree.pi))

    def bias(n: int) -> float:
        total = 0.0
        for combination in itertools.product(range(4), repeat=n):
            index = list(combination)
            estimate = (weight_P[index] * tree.reward_P[index]).sum() / weight_P[index].sum()
            total += float(probability_P[index].prod() * estimate)
        return total - truth

    two, four, six = bias(2), bias(4), bias(6)
    assert abs(two) > 1e-3
    assert two / four == pytest.approx(2, rel=0.2)
    assert two / six == pytest.approx(3, rel=0.25)
