"""What 2512.23087's restriction rests on (papers.md 10, statement 7 of 15): logit noise, restriction bias, gradients. All in float64.

Theta and its support come from the product's own `vocabulary_stats`, run on trees: hidden = one-hot contexts, weight = their logits.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.actor.logprobs import Support, VocabShard, vocabulary_stats

from .mdp import Tree, random_tree

every_rho = pytest.mark.parametrize("rho", [0.05, 0.3, 0.7])
TREES = [random_tree(300 + seed, v, t) for seed, (v, t) in enumerate([(3, 4), (4, 3), (5, 3)])]
every_tree = pytest.mark.parametrize("tree", TREES, ids=lambda t: f"V{t.vocabulary}T{t.horizon}")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# -- logit noise -------------------------------------------------------------------------------------------------------------------------


def noisy(seed: int, trials: int = 4000, vocabulary: int = 6, epsilon: float = 0.5) -> tuple[Tensor, Tensor, float]:
    """[trials, V] log p and log q of q = softmax(z + e), |e| <= epsilon; half of the noise sits on the corners, where bounds are tight."""
    g = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(trials, vocabulary, generator=g, dtype=torch.float64)
    e = epsilon * (2 * torch.rand(trials, vocabulary, generator=g, dtype=torch.float64) - 1)
    e[::2] = epsilon * e[::2].sign()
    return z.log_softmax(1), (z + e).log_softmax(1), epsilon


@pytest.mark.parametrize("seed", range(3))
def test_logit_noise_bounds(seed: int) -> None:
    """The three valid forms, for every token of every trial."""
    log_p, log_q, epsilon = noisy(seed)
    p, q, d = log_p.exp(), log_q.exp(), log_q - log_p
    slack = 1e-12
    upper, lower = -(p + (1 - p) * math.exp(-2 * epsilon)).log(), -(p + (1 - p) * math.exp(2 * epsilon)).log()
    assert (lower - slack <= d).all() and (d <= upper + slack).all()
    assert (upper <= 2 * epsilon * (1 - p) + slack).all()
    assert (d.abs() <= math.expm1(2 * epsilon) * (1 - p) + slack).all()
    assert (d.abs() <= 2 * epsilon * (1 - torch.minimum(p, q)) + slack).all()


def test_two_sided_bound_is_attained() -> None:
    """All noise against, or all for, one token: log(q/p) is the bound itself."""
    epsilon, z = 0.5, torch.tensor([1.0, 0.3, -2.0], dtype=torch.float64)
    p = z.softmax(0)[0]
    for sign in (1.0, -1.0):
        e = sign * epsilon * torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
        d = (z + e).log_softmax(0)[0] - z.log_softmax(0)[0]
        close(d, -(p + (1 - p) * math.exp(-sign * 2 * epsilon)).log())


def test_the_form_with_a_single_p_fails_on_the_lower_side() -> None:
    """Two equally likely tokens, epsilon = 1/2 against the first: q = 1 / (1 + e), log(q/p) = -0.620, yet 2 epsilon (1 - p) = 0.5."""
    epsilon, p, q = 0.5, 0.5, 1 / (1 + math.e)
    assert math.log(q / p) == pytest.approx(-0.6201145)
    assert abs(math.log(q / p)) > 2 * epsilon * (1 - p)
    assert abs(math.log(q / p)) <= 2 * epsilon * (1 - min(p, q))
    log_p, log_q, epsilon = noisy(0)
    broken = (log_q - log_p).abs() > 2 * epsilon * (1 - log_p.exp()) + 1e-12
    assert broken.any()  # not only by construction: random trials break it too
    assert (log_q < log_p)[broken].all()


def test_likely_tokens_are_safe_and_tail_tokens_are_not() -> None:
    """The bound is (1 - p) times a constant: it vanishes as p goes to 1 and is all of 2 epsilon in the tail, where it can be met."""
    epsilon = 0.1
    z = torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    e = epsilon * torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    d = (z + e).log_softmax(0) - z.log_softmax(0)
    assert abs(d[0]) < 1e-4
    assert d[1] > 0.199


# -- restriction -------------------------------------------------------------------------------------------------------------------------


def restrict(policy: list[Tensor], rho: float) -> tuple[list[Tensor], list[Tensor]]:
    """(pi^S, Z) in every context: [V^t, V] and [V^t] at depth t."""
    laws, masses = [], []
    for p in policy:
        contexts, vocabulary = p.shape
        hidden, weight = torch.eye(contexts, dtype=torch.float64), p.log().T.contiguous()
        ids = torch.arange(vocabulary).expand(contexts, vocabulary)
        shard = VocabShard(0, vocabulary, None)
        stats = vocabulary_stats(hidden, weight, p.argmax(1), shard, support=Support(min_p=rho), ids_TJ=ids)
        assert stats.at_ids_TJ is not None and stats.kept_mass_T is not None
        laws.append(stats.at_ids_TJ.exp())
        masses.append(stats.kept_mass_T)
    return laws, masses


def path_law(tree: Tree, policy: list[Tensor]) -> Tensor:
    """[P]; a path through a pruned token has probability 0."""
    return tree.logp(policy).sum(1).exp()


def along(tree: Tree, x: list[Tensor]) -> Tensor:
    """[P, T] a quantity of each context that a path passes through."""
    return torch.stack([x[t][tree.context(t)] for t in range(tree.horizon)], dim=1)


@every_rho
@every_tree
def test_membership_and_mass_are_those_of_min_p(tree: Tree, rho: float) -> None:
    laws, masses = restrict(tree.pi, rho)
    for p, law, mass in zip(tree.pi, laws, masses, strict=True):
        keep = p >= rho * p.amax(1, keepdim=True)
        close(mass, (p * keep).sum(1))
        close(law, torch.where(keep, p / mass[:, None], 0.0))
        close((p - law).abs().sum(1) / 2, 1 - mass)  # TV of one token
        assert (1 - mass <= rho * (~keep).sum(1) * p.amax(1) + 1e-12).all()
    if rho > 0.05:
        assert min(float(m.min()) for m in masses) < 0.99  # something was pruned


@every_rho
@every_tree
def test_total_variation_of_paths(tree: Tree, rho: float) -> None:
    """TV = 1 - E_piS[prod Z] = P_pi(some token outside S) <= sum_t E_piS[1 - Z]."""
    laws, masses = restrict(tree.pi, rho)
    whole_P, restricted_P, mass_PT = path_law(tree, tree.pi), path_law(tree, laws), along(tree, masses)
    tv = (whole_P - restricted_P).abs().sum() / 2
    close(tv, 1 - (restricted_P * mass_PT.prod(1)).sum())
    close(tv, whole_P[restricted_P == 0].sum())
    assert tv <= (restricted_P[:, None] * (1 - mass_PT)).sum() + 1e-12


@every_rho
@every_tree
def test_kl_of_paths(tree: Tree, rho: float) -> None:
    """KL(piS || pi) = E_piS[-sum log Z]."""
    laws, masses = restrict(tree.pi, rho)
    whole_P, restricted_P = path_law(tree, tree.pi), path_law(tree, laws)
    log_ratio_P = torch.where(restricted_P > 0, (restricted_P / whole_P).log(), 0.0)
    close((restricted_P * log_ratio_P).sum(), -(restricted_P[:, None] * along(tree, masses).log()).sum())


@every_rho
@every_tree
def test_bias_of_the_restricted_objective(tree: Tree, rho: float) -> None:
    """|J(pi) - J(piS)| <= TV of the path laws <= T (1 - Z_min), rewards in [0, 1]."""
    laws, masses = restrict(tree.pi, rho)
    whole_P, restricted_P = path_law(tree, tree.pi), path_law(tree, laws)
    bias = ((whole_P - restricted_P) * tree.reward_P).sum().abs()
    tv = (whole_P - restricted_P).abs().sum() / 2
    assert bias <= tv + 1e-12
    assert tv <= tree.horizon * (1 - min(m.min() for m in masses)) + 1e-12


@every_rho
def test_gradient_is_exactly_zero_on_pruned_logits(rho: float) -> None:
    """grad log piS(a) = onehot(a) - piS: the whole gradient, which is 0 and not merely small outside S."""
    generator = torch.Generator().manual_seed(11)
    rows, vocabulary = 40, 12
    z = 2 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    weight = z.T.contiguous().requires_grad_()
    labels = z.argmax(1)
    ids = torch.arange(vocabulary).expand(rows, vocabulary)
    shard = VocabShard(0, vocabulary, None)
    stats = vocabulary_stats(torch.eye(rows, dtype=torch.float64), weight, labels, shard, support=Support(min_p=rho), ids_TJ=ids)
    (grad_VR,) = torch.autograd.grad(stats.logp_T.sum(), weight)
    keep = z.softmax(1) >= rho * z.softmax(1).amax(1, keepdim=True)
    assert (~keep).any()
    assert (grad_VR.T[~keep] == 0).all()
    law = z.masked_fill(~keep, -torch.inf).softmax(1)
    close(grad_VR.T, torch.nn.functional.one_hot(labels, vocabulary) - law)


@every_rho
@every_tree
def test_full_behaviour_with_restricted_target_is_unbiased(tree: Tree, rho: float) -> None:
    """Support agreement (c): piS / mu is a valid importance ratio, with 0 for a sampled token outside S: E_mu[W R] = J(piS)."""
    laws, _ = restrict(tree.pi, rho)
    weight_P = (tree.logp(laws) - tree.logp(tree.mu)).sum(1).exp()
    close(tree.under(tree.mu, weight_P * tree.reward_P), (path_law(tree, laws) * tree.reward_P).sum())


@every_rho
def test_truncated_sampling_without_replay_is_off_by_the_kept_mass(rho: float) -> None:
    """10.1: the sampler renormalises over S and the trainer does not, at equal weights: the mean ratio is Z; with replay it is 1."""
    (law,), (mass,) = restrict([TREES[2].pi[2]], rho)
    p = TREES[2].pi[2]
    close((law * torch.where(law > 0, p / law, 0.0)).sum(1), mass)
    keep_ids = torch.where(law > 0, torch.arange(p.shape[1]), -1)
    replayed = vocabulary_stats(
        torch.eye(len(p), dtype=torch.float64),
        p.log().T.contiguous(),
        p.argmax(1),
        VocabShard(0, p.shape[1], None),
        support=Support(keep_TK=keep_ids),
        ids_TJ=torch.arange(p.shape[1]).expand_as(p),
    )
    assert replayed.at_ids_TJ is not None
    close(replayed.at_ids_TJ.exp(), law)
