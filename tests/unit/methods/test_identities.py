"""The identities of papers.md 2 and the bounds of 3.2, 4, 5 and 8.3, by exact enumeration of small trees in float64.

Where each of the 19 statements of papers.md 15 is tested (files of this folder unless a path is given; here: this file):

 1  identities 2.1 to 2.8            here: performance_difference ... martingales_and_sample_estimators; 2.9 is statement 9
 2  TRM bounds, reference table      here: every_bound_holds, reference_table, relations_between_bounds
 3  DPPO and CPPO bounds             here: every_bound_holds, cppo_bounds_hold_where_its_rule_is_kept; CPPO = DPPO: test_formulas LIMITS
 4  binary <= top-K <= exact         here: partitions_are_ordered
 5  E|rho-1|, E k1, E k3             here: martingales_and_sample_estimators
 6  prefix KL generators             here: kl_chain_and_prefix_generators
 7  DVP                              noise bounds and path identities: test_dvp_theory; shards, padding, gradient:
                                     tests/unit/test_logprobs.py, tests/dist/test_sharded_logprobs.py; pruned training is exact importance
                                     sampling: here, pruned_training_*
 8  SIS acceptance                   test_draws: sis_accepts_tokens_as_if_theta_had_drawn_them
 9  gradients at theta = old = mu    test_invariants: on_policy_gradient_is_reinforce
10  detachment                       test_invariants: only_theta_carries_a_gradient (and packs.DetachedSegments everywhere)
11  length bias of TRM-Max           test_draws: trm_max_rejects_by_length_and_geometric_tests_do_not
12  context parallelism, packing     tests/dist/test_sharded_segments.py: shards_equal_the_whole; test_segments;
                                     test_invariants: packing_*, tool_*
13  ACPO-Adaptive's bins, any layout test_invariants: packing_changes_nothing; tests/dist/test_layouts.py
14  SORL: kept + C = unclipped       test_formulas: sorl_clipped_loss_completes_the_gradient
15  MIPU                             verdicts and state: test_host_side mipu_*; bit-exact restore: tests/dist/test_rollback.py,
                                     with an engine: tests/e2e/test_methods.py
16  length-triggered learning rate   test_host_side: length_lr_triggers_once_and_floors, a_growing_length_triggers_where_it_crosses
17  routing replay                   tests/unit/test_routing.py, tests/dist/test_actor_parity.py
18  ascent, SNIS, seq-MIS            here: ascent_*, self_normalised_bias_shrinks_with_the_batch, sequence_mask_bias_formula
19  denominators                     here: denominators_differ_by_the_acceptance_rate
"""

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
from .packs import evaluate, make, random_batch, stack

TREES = [random_tree(seed, v, t, distance) for seed, (v, t, distance) in enumerate([(3, 4, 0.5), (4, 3, 1.0), (3, 5, 0.2), (5, 3, 0.05)])]
every_tree = pytest.mark.parametrize("tree", TREES, ids=lambda t: f"V{t.vocabulary}T{t.horizon}")


def close(a: Tensor | float, b: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def packed(tree: Tree, logp_PT: Tensor, advantages_PT: Tensor, **more: Tensor) -> Tokens:
    """All paths as one micro-batch, with old = mu."""
    paths, horizon = logp_PT.shape
    segments = LocalSegments(torch.arange(paths).repeat_interleave(horizon), torch.ones(paths * horizon, dtype=torch.bool), paths)
    mu_T = tree.logp(tree.mu).reshape(-1)
    return Tokens.of(logp_PT.reshape(-1), mu_T, mu_T, advantages_PT.reshape(-1), segments, **more)  # type: ignore[arg-type]


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


def pruned(probabilities: list[Tensor], rho: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(pi^S, membership, kept mass) of DVP's min-p rule in every context; membership carries no gradient."""
    member = [(p >= rho * p.amax(1, keepdim=True)).detach() for p in probabilities]
    kept = [(p * m).sum(1, keepdim=True) for p, m in zip(probabilities, member, strict=True)]
    return [p * m / k for p, m, k in zip(probabilities, member, kept, strict=True)], member, kept


@every_tree
@pytest.mark.parametrize("reach", ["sequence", "suffix"])
def test_pruned_training_from_unpruned_samples_is_exact(tree: Tree, reach: str) -> None:
    """papers.md 10, 5c: grad J(pi^S) from samples of the unpruned mu. With the realised return, the sequence's weight and reach sequence;
    with A of pi^S, prefix weights (EPIC's window open) and reach suffix. theta gives labels outside 0.7: nothing may depend on it."""
    logits = [p.log().clone().requires_grad_() for p in tree.pi]
    restricted, member, kept = pruned([x.softmax(1) for x in logits], 0.5)

    def along(policy: list[Tensor]) -> Tensor:
        return torch.stack([policy[t][tree.context(t), tree.token(t)] for t in range(tree.horizon)], dim=1)

    inside_PT, probability_PT = along(member), along(restricted)
    assert 0.1 < inside_PT.double().mean() < 0.95
    exact = torch.autograd.grad((probability_PT.prod(1) * tree.reward_P).sum(), logits, retain_graph=True)

    logp_PT = torch.where(inside_PT, probability_PT, 0.7).log()
    mass_PT = torch.stack([kept[t][tree.context(t), 0] for t in range(tree.horizon)], dim=1)
    weight_P1 = tree.logp(tree.mu).sum(1).exp()[:, None]
    advantage_PT = tree.reward_P[:, None].expand_as(logp_PT)
    if reach == "suffix":
        advantage_PT = tree.advantage([p.detach() for p in restricted])
    tokens = packed(tree, logp_PT, weight_P1 * advantage_PT, inside_T=inside_PT.reshape(-1), kept_mass_T=mass_PT.reshape(-1))
    dvp, whole = ("dvp", {"support": "unpruned", "reach": reach}), ("tis", {"level": "sequence", "pair": "theta/mu", "cap": 1e9})
    sum_over = "seq-mean-token-sum"
    built = stack("epic", {"delta": 1e12}, [dvp], sum_over)
    if reach == "sequence":
        built = stack("policy_gradient", {"weight": "none"}, [whole, dvp], sum_over)
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


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("step", [0.05, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("bias", [(0.0, 0.0), (0.3, -0.2), (-0.8, 0.5)])
def test_ascent_on_a_quadratic(step: float, bias: tuple[float, float]) -> None:
    """8.3, statement 18: J(x) = -1/2 x H x at x = (1, -2), so grad J = -H x; the estimate is grad + bias +- (0.6, -0.4), each half the
    time. The inequality is an equality where H = L times the identity, and strict where one curvature is smaller."""
    x, noise, offset, smoothness = vector(1, -2), vector(0.6, -0.4), vector(*bias), 1.2

    def gain(curvature: Tensor) -> tuple[float, Tensor]:
        gradient = -curvature * x
        moved = [x + step * (gradient + offset + sign * noise) for sign in (1, -1)]
        return float(sum(-(curvature * m**2).sum() / 4 for m in moved) + (curvature * x**2).sum() / 2), gradient

    for curvature, tight in ((vector(1.2, 1.2), True), (vector(1.2, 0.3), False)):
        actual, gradient = gain(curvature)
        bound = bounds.ascent(step, smoothness, gradient.tolist(), bias, float((noise**2).sum()))
        assert actual == pytest.approx(bound, rel=1e-12) if tight else actual > bound


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "corrections",
    [[], [("tis", {"level": "sequence", "cap": 1.2})], [("mis", {"high": 1.2})], [("tis", {"level": "sequence", "cap": 1e9})]],
    ids=["none", "tis", "mis", "exact"],
)
def test_ascent_with_the_bias_and_variance_of_each_correction(seed: int, corrections: list[tuple[str, dict]]) -> None:
    """The same on a softmax bandit with rewards in [0, 1], whose J is 5/2-smooth in the logits, one sample from mu a step: bias and
    variance of the stack's own gradient, over all five actions. Importance weights without a cap have no bias."""
    tree = random_tree(300 + seed, 5, 1, distance=1.0)
    logits = tree.pi[0][0].log()
    mu = tree.mu[0][0]
    corrections = [(name, {**params, "pair": "theta/mu"}) for name, params in corrections]
    built = stack("policy_gradient", {"weight": "none"}, corrections, "seq-mean-token-sum")
    estimates = []
    for action in range(5):
        s = make(logits[action : action + 1], mu[action : action + 1].log(), advantages=float(tree.reward_P[action]))
        score = torch.nn.functional.one_hot(torch.tensor(action), 5) - logits.exp()
        estimates.append(-evaluate(built, [s]).grads[0] * score)
    g_AV = torch.stack(estimates)
    gradient = logits.exp() * (tree.reward_P - tree.value(tree.pi))
    bias = mu @ g_AV - gradient
    variance = float(mu @ (g_AV - mu @ g_AV).square().sum(1))
    if corrections and corrections[0][1].get("cap") == 1e9:
        close(bias, torch.zeros(5))
    else:
        assert bias.abs().max() > 1e-4
    for step in (0.05, 0.2, 1.0):
        after = torch.stack([((logits + step * g).softmax(0) * tree.reward_P).sum() for g in g_AV])
        assert float(mu @ after - tree.value(tree.pi)) >= bounds.ascent(step, 2.5, gradient.tolist(), bias.tolist(), variance) - 1e-12


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_denominators_differ_by_the_acceptance_rate(aggregation: str) -> None:
    """Statement 19: rejected ones in the denominator (the rule here) or out of it (verl): the ratio of the two losses is the acceptance
    rate, of tokens under token-mean and of sequences under a sequence mean."""
    batch = random_batch(41, lengths=(6, 3, 9, 5, 4, 7), spread=0.5)
    built = stack("policy_gradient", {}, [("geo_rs", {"low": 0.9, "high": 1.1, "pair": "theta/mu"})], aggregation)
    outcome = evaluate(built, batch)
    kept = [s for s, g in zip(batch, outcome.grads, strict=True) if (g != 0).any()]
    assert 0 < len(kept) < len(batch)
    share = outcome.metrics["geo_rs/kept_share"] if aggregation == "token-mean" else len(kept) / len(batch)
    assert outcome.loss / evaluate(built, kept).loss == pytest.approx(share)
