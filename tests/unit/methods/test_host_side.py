"""What happens to groups, rewards, steps and learning rates around the loss: POPO, dynamic sampling, overlong, KL in the reward, MIPU,
length-triggered learning rate, VCPO."""

from __future__ import annotations

import dataclasses
import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_rl.methods.dynamic_sampling import Group, by_group, is_informative, missing, select
from megatron_rl.methods.kl_in_reward import KLInRewardConfig, kl_in_reward
from megatron_rl.methods.length_lr import LengthLRConfig, LengthLRState, length_lr
from megatron_rl.methods.mipu import MIPUConfig, MIPUState, accept, decide, gap_terms, tolerance
from megatron_rl.methods.overlong import OverlongConfig, overlong_penalty
from megatron_rl.methods.popo import POPOConfig, refill, staleness
from megatron_rl.methods.vcpo import VCPOConfig, VCPOState, effective_share, vcpo
from megatron_rl.types import Prompt, Trajectory

from .mdp import random_tree


def group(name: str, rewards: list[float | None], version: int = 0) -> Group:
    """A group of two-token answers sampled with that weight version."""
    prompt = Prompt(f"p-{name}", np.array([1], np.int32), "?", "!")

    def one(reward: float | None) -> Trajectory:
        return Trajectory(
            prompt, name, np.array([1, 2, 3], np.int32), np.array([False, True, True]), np.array([np.nan, -1, -1], np.float32),
            np.array([-1, version, version + 1], np.int32), np.array([-1, 0, 0], np.int32), None, "stop", "", reward,
        )  # fmt: skip

    return tuple(one(r) for r in rewards)


def names(groups: list[Group] | tuple[Group, ...]) -> list[str]:
    return [g[0].group for g in groups]


def test_informative_groups() -> None:
    assert is_informative(group("a", [1, 0, 1]))
    assert not is_informative(group("a", [1, 1]))
    assert not is_informative(group("a", [0.5]))
    with pytest.raises(ValueError, match="group 'a' has none"):
        is_informative(group("a", [1, None]))


def test_dynamic_sampling_takes_informative_groups_first() -> None:
    """Two of four informative groups are wanted, then three more than there are: the shortage is filled in order of arrival."""
    rounds = [group("a", [1, 1]), group("b", [1, 0]), group("c", [0, 0]), group("d", [0, 1]), group("e", [2, 1])]
    assert names(select(rounds, 2)) == ["b", "d"]
    assert missing(rounds, 2) == 0
    assert names(select(rounds, 4)) == ["b", "d", "e", "a"]
    assert missing(rounds, 4) == 1
    assert select([], 3) == []
    shuffled = [rounds[1][0], rounds[3][0], rounds[1][1], rounds[3][1]]
    assert names(by_group(shuffled)) == ["b", "d"]
    assert [len(g) for g in by_group(shuffled)] == [2, 2]


def test_popo_replaces_uninformative_groups_newest_first() -> None:
    """Two of three fresh groups are flat. The buffer's newest, then its second newest take their places; the fresh informative one enters
    last and was not used twice."""
    buffer = (group("old", [1, 0], 3), group("mid", [0, 1], 4), group("new", [1, 0], 5))
    fresh = [group("flat1", [1, 1], 6), group("good", [0, 1], 6), group("flat2", [0, 0], 6)]
    batch, after, metrics = refill(fresh, buffer, 7, POPOConfig())
    assert names(batch) == ["new", "good", "mid"]
    assert names(after) == ["old", "mid", "new", "good"]
    values = {k: float(n / d) for k, (n, d) in metrics.items()}
    # ages: new was sampled from version 5 on, mid from 4, and the weights are at 7
    assert values == {"uninformative_share": 2 / 3, "replaced_share": 2 / 3, "expired_share": 0, "staleness_mean": 2.5, "buffer_groups": 4}
    assert refill(fresh, buffer, 7, POPOConfig())[:2] == (batch, after), "deterministic"
    once = refill(fresh, buffer, 7, POPOConfig(keep_used=False))
    assert names(once[0]) == ["new", "good", "mid"]
    assert names(once[1]) == ["old", "good"]


def test_popo_expires_and_bounds() -> None:
    """Of ages 7, 5 and 1, those over 5 expire; a buffer of two keeps the newest two; with nothing stored a flat group stays."""
    buffer = (group("ancient", [1, 0], 1), group("edge", [1, 0], 3), group("new", [1, 0], 7))
    assert [staleness(g, 8) for g in buffer] == [7, 5, 1]
    fresh = [group(f"flat{i}", [1, 1], 8) for i in range(3)] + [group("good", [1, 0], 8)]
    batch, after, metrics = refill(fresh, buffer, 8, POPOConfig(buffer_groups=2))
    assert names(batch) == ["new", "edge", "flat2", "good"]
    assert names(after) == ["new", "good"]
    assert [float(x) for x in metrics["expired_share"]] == [1, 3]
    batch, after, metrics = refill(fresh[:1], (), 8, POPOConfig())
    assert (names(batch), after) == (["flat0"], ())
    assert float(metrics["staleness_mean"][1]) == 0, "nothing was replaced: no mean"


steps_of_groups = st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(steps_of_groups, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_popo_over_many_steps(run: list[list[bool]], size: int, oldest: int, keep_used: bool) -> None:
    """Any run of steps (True: informative): the batch keeps its size and every informative group its place, none appears twice, what is
    stored is informative, in order of age, within bounds; a flat group stays only where nothing was left to replace it."""
    config, buffer = POPOConfig(buffer_groups=size, max_staleness=oldest, keep_used=keep_used), ()
    for version, step in enumerate(run, start=1):
        fresh = [group(f"{version}.{i}", [1, 0] if good else [1, 1], version - 1) for i, good in enumerate(step)]
        live = [g for g in buffer if staleness(g, version) <= oldest]
        batch, after, _ = refill(fresh, buffer, version, config)
        assert len(batch) == len(fresh)
        assert len(set(names(batch))) == len(batch)
        assert all(a is b for a, b, good in zip(batch, fresh, step, strict=True) if good)
        assert sum(map(is_informative, batch)) == min(len(step), sum(step) + len(live))
        assert all(is_informative(g) and staleness(g, version) <= max(1, oldest) for g in after)
        assert len(after) <= size
        ages = [staleness(g, version) for g in after]
        assert ages == sorted(ages, reverse=True)
        assert names(after)[-sum(step) :] == [n for n, good in zip(names(fresh), step, strict=True) if good][-size:] or not any(step)
        buffer = after


def test_popo_uses_whole_groups_and_keeps_their_rewards() -> None:
    stored = group("stored", [1, 0, 0, 1], 5)
    (batch,) = refill([group("flat", [1, 1], 6)], (stored,), 6, POPOConfig())[0]
    assert batch is stored


def test_overlong_penalty() -> None:
    """DAPO's numbers: free to 16384, half-way through the buffer -0.5, -1 from 20480 on; the limit may be the rollout's."""
    lengths = [10, 16384, 18432, 20480, 30000]
    assert overlong_penalty(lengths, OverlongConfig(max_length=20480), 99999).tolist() == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(lengths, OverlongConfig(penalty=2.0), 20480).tolist() == [0, 0, -1, -2, -2]
    with pytest.raises(ValueError, match=r"methods\.params\.buffer: 4096 exceeds rollout\.max_new_tokens = 100"):
        overlong_penalty([1], OverlongConfig(), 100)


def test_kl_in_reward() -> None:
    """d = log ref - log pi = -0.5: k1 = 0.5, k2 = 0.125, k3 = e^-0.5 - 0.5; the masked token, though NaN, adds 0."""
    logp, reference = np.array([-1.0, np.nan], np.float32), np.array([-1.5, -1.0], np.float32)
    mask = np.array([True, False])
    for estimator, expected in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)):
        config = KLInRewardConfig(0.1, estimator)  # type: ignore[arg-type]
        assert kl_in_reward(logp, reference, mask, config) == pytest.approx([-0.1 * expected, 0])


def test_k1_in_the_reward_has_the_gradient_of_the_kl() -> None:
    """Enumerated over a tree: E_pi[ (sum_t -k1_t) grad log pi ] = -grad KL(pi || ref), which a k1 *loss* would not give."""
    tree = random_tree(3, 3, 3)
    logits = [p.log().clone().requires_grad_() for p in tree.pi]
    policy = [x.softmax(1) for x in logits]
    logp_PT, reference_PT = tree.logp(policy), tree.logp(tree.mu)
    probability_P = logp_PT.sum(1).exp()
    exact = torch.autograd.grad(-(probability_P * (logp_PT - reference_PT).sum(1)).sum(), logits, retain_graph=True)
    mask, config = np.ones(3, dtype=bool), KLInRewardConfig(1.0, "k1")
    reward_P = [kl_in_reward(a.detach().numpy(), b.numpy(), mask, config).sum() for a, b in zip(logp_PT, reference_PT, strict=True)]
    score = (probability_P.detach() * torch.tensor(reward_P) * logp_PT.sum(1)).sum()
    for a, b in zip(torch.autograd.grad(score, logits), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_mipu_gap_on_a_tree(seed: int) -> None:
    """Over all paths weighted by mu, the sequence form is J(mu) - J(pi) exactly, the first-order form minus the first-order surrogate."""
    tree = random_tree(seed, 3, 4)
    weight_P = tree.logp(tree.mu).sum(1).exp()
    rewards, log_ratios = tree.reward_P.tolist(), list(tree.log_rho.numpy())
    sequence = torch.tensor(gap_terms(rewards, log_ratios, MIPUConfig(estimator="sequence")))
    torch.testing.assert_close((weight_P * sequence).sum(), tree.value(tree.mu) - tree.value(tree.pi))
    first = torch.tensor(gap_terms(rewards, log_ratios, MIPUConfig(estimator="first_order")))
    torch.testing.assert_close((weight_P * first).sum(), -tree.under(tree.mu, tree.reward_P * (tree.log_rho.exp() - 1).sum(1)))


def test_mipu_gap_by_hand() -> None:
    """Rewards 2 and 0 (whose ratios do not matter): twice 1 - e^0.1 from log-ratios 0.2 and -0.1, or twice (1 - e^0.2) + (1 - e^-0.1)."""
    log_ratios = [np.array([0.2, -0.1]), np.array([5.0])]
    sequence, first = MIPUConfig(estimator="sequence"), MIPUConfig(estimator="first_order")
    assert gap_terms([2.0, 0.0], log_ratios, sequence) == pytest.approx([2 * (1 - math.exp(0.1)), 0])
    assert gap_terms([2.0, 0.0], log_ratios, first) == pytest.approx([2 * (2 - math.exp(0.2) - math.exp(-0.1)), 0])
    assert gap_terms([1.0, 1.0], [np.zeros(3), np.zeros(0)], first).tolist() == [0, 0], "engines that agree have no gap"
    assert np.isfinite(gap_terms([1.0], [np.array([400.0, 400.0])], sequence)).all()
    assert gap_terms([], [], first).shape == (0,)


def test_mipu_tolerance_and_verdict() -> None:
    """From 8e-4 to 1e-4 over ten steps; kept iff the gap is at least -c."""
    config = MIPUConfig(anneal_steps=10)
    assert [tolerance(s, config) for s in (0, 5, 10, 99)] == pytest.approx([8e-4, 4.5e-4, 1e-4, 1e-4])
    assert accept(-1e-4, 1e-4)
    assert accept(0.5, 1e-4)
    assert not accept(-1.1e-4, 1e-4)
    assert not accept(math.nan, 1e-4)


def test_mipu_decisions_go_through_a_checkpoint_and_never_starve() -> None:
    """A gap that is always bad: two rollbacks, one forced step, two rollbacks, ...; the state survives JSON."""
    config, state, seen = MIPUConfig(max_consecutive_rollbacks=2), MIPUState(), []
    for _ in range(6):
        state, verdict = decide(MIPUState(**json.loads(json.dumps(dataclasses.asdict(state)))), -1.0, config)
        seen.append((verdict.accepted, verdict.forced))
    assert seen == [(False, False), (False, False), (True, True)] * 2
    assert state == MIPUState(steps=6, consecutive_rollbacks=0, rollbacks=4)
    state, verdict = decide(MIPUState(steps=6, consecutive_rollbacks=2), 0.0, config)
    assert (verdict.accepted, verdict.forced, state.consecutive_rollbacks) == (True, False, 0)


def test_length_lr_triggers_once_and_floors() -> None:
    """Statement 16: mean length 1000 until step 109, 3500 from 110 on, baseline 1000, so the surge is at 110; period 1.8 x 110 = 198:
    halved at steps 198, 396 and 594, then 0.1 instead of 0.0625 from 792 on."""
    state, factors = LengthLRState(), []
    for step in range(1, 1001):
        state, factor = length_lr(state, 1000.0 if step < 110 else 3500.0, LengthLRConfig())
        state = LengthLRState(**json.loads(json.dumps(dataclasses.asdict(state))))  # as a checkpoint would restore it
        factors.append(factor)
    assert state.surge_step == 110
    changes = {i + 1: b for i, (a, b) in enumerate(zip([1.0, *factors], factors, strict=False)) if a != b}
    assert changes == {198: 0.5, 396: 0.25, 594: 0.125, 792: 0.1}


def test_a_growing_length_triggers_where_it_crosses() -> None:
    """Statement 16 with growth: 1000 to step 100, then 25 more a step up to 3500: 3000 is exceeded first at step 181, once for all."""
    state = LengthLRState()
    for step in range(1, 400):
        state, _ = length_lr(state, min(3500.0, 1000.0 + 25 * max(0, step - 100)), LengthLRConfig())
        assert state.surge_step == (None if step < 181 else 181)


def test_length_lr_ignores_the_baseline_window_and_small_growth() -> None:
    state = LengthLRState()
    for step in range(1, 400):
        state, factor = length_lr(state, 5000.0 if step == 20 else 1000.0 + step, LengthLRConfig())
        assert factor == 1.0
    assert state.surge_step is None


def test_effective_share() -> None:
    """Weights 1, 1 use all; 1, 3 use (4)^2 / (2 * 10) = 0.8; a factor e^1000 on all changes nothing."""
    assert effective_share([0.0, 0.0]) == 1
    assert effective_share([1000.0, 1000.0 + math.log(3)]) == pytest.approx(0.8)
    for bad in ([], [0.0, math.nan]):
        with pytest.raises(ValueError, match="log_weights"):
            effective_share(bad)


def test_vcpo() -> None:
    """The first step's share 0.8 becomes the reference: weights 1, 0, 0, 0 then use a quarter: sqrt(0.25/0.8); never above 1."""
    state, factor, share = vcpo(VCPOState(), [0.0, math.log(3)], VCPOConfig())
    assert (factor, share, state.reference_share) == (1.0, pytest.approx(0.8), pytest.approx(0.8))
    state = VCPOState(**json.loads(json.dumps(dataclasses.asdict(state))))
    worse = [0.0, -200.0, -200.0, -200.0]
    assert vcpo(state, worse, VCPOConfig())[1] == pytest.approx(math.sqrt(0.25 / 0.8))
    assert vcpo(state, [0.0, 0.0], VCPOConfig())[:2] == (state, 1.0)
    assert vcpo(state, worse, VCPOConfig(reference_share=0.9))[1] == pytest.approx(math.sqrt(0.25 / 0.9))
    assert vcpo(state, worse, VCPOConfig(floor=0.7))[1] == 0.7
