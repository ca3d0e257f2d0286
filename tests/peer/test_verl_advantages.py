"""Advantages, KL in the reward and the critic's loss against verl's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.methods.gae import gae, moments, whiten
from megatron_rl.methods.group import GroupConfig, group_advantages
from megatron_rl.methods.kl_in_reward import KLInRewardConfig, kl_in_reward
from megatron_rl.methods.value_loss import value_loss

from .verl_side import core_algos

many = settings(max_examples=40, deadline=None)
Groups = list[list[float]]


def groups(smallest: int = 2) -> st.SearchStrategy[Groups]:
    """One to four groups of rewards, multiples of 1/8, so that a sum is exact in fp32 and an all-equal group exactly flat."""
    reward = st.integers(-16, 16).map(lambda k: k / 8)
    return st.lists(st.lists(reward, min_size=smallest, max_size=6), min_size=1, max_size=4)


def flat(values: Groups) -> tuple[list[float], list[str]]:
    """(rewards, group names), members interleaved."""
    pairs = [(k, i, r) for i, group in enumerate(values) for k, r in enumerate(group)]
    return [r for *_, r in sorted(pairs)], [f"g{i}" for _, i, _ in sorted(pairs)]


def verl(estimator: str, rewards: list[float], names: list[str], **options: object) -> np.ndarray:
    """[n] the advantage of each answer; the reward stands at the last of three tokens."""
    token_rewards = torch.zeros(len(rewards), 3, dtype=torch.float64)
    token_rewards[:, -1] = torch.tensor(rewards, dtype=torch.float64)
    index = np.array(names, dtype=object)
    answer, _ = core_algos.get_adv_estimator_fn(estimator)(token_rewards, torch.ones(len(rewards), 3), index=index, **options)
    assert (answer == answer[:, :1]).all()
    return answer[:, 0].numpy()


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
@many
@given(values=groups())
def test_centred_on_the_mean(estimator: str, values: Groups) -> None:
    rewards, names = flat(values)
    ours = group_advantages(rewards, names, GroupConfig(scale_by_std=False))
    np.testing.assert_allclose(ours, verl(estimator, rewards, names, norm_adv_by_std_in_grpo=False), atol=1e-6)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
@many
@given(values=groups())
def test_leave_one_out(estimator: str, values: Groups) -> None:
    rewards, names = flat(values)
    ours = group_advantages(rewards, names, GroupConfig(baseline="leave-one-out", scale_by_std=False))
    np.testing.assert_allclose(ours, verl(estimator, rewards, names), atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
@many
@given(values=groups())
def test_scaled_by_the_sample_deviation(estimator: str, values: Groups) -> None:
    """Ours with std: sample; the default is the population's (test_verl_differences)."""
    rewards, names = flat(values)
    ours = group_advantages(rewards, names, GroupConfig(std="sample"))
    np.testing.assert_allclose(ours, verl(estimator, rewards, names), atol=1e-5)


@pytest.mark.parametrize(("estimator", "peer"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
@many
@given(values=st.lists(st.tuples(st.integers(-250, -1), st.integers(-230, 230), st.booleans()), min_size=1, max_size=8))
def test_kl_in_reward(estimator: str, peer: str, values: list[tuple[int, int, bool]]) -> None:
    """verl subtracts beta times its kl_penalty from the token rewards. k3 below its cap of 10 (test_verl_differences)."""
    logp = np.array([a / 100 for a, _, _ in values], dtype=np.float32)
    reference = np.array([(a + d) / 100 for a, d, _ in values], dtype=np.float32)
    mask = np.array([m for *_, m in values])
    theirs = core_algos.kl_penalty(torch.from_numpy(logp), torch.from_numpy(reference), peer) * torch.from_numpy(mask)
    ours = kl_in_reward(logp, reference, mask, KLInRewardConfig(beta=0.3, estimator=estimator))  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, -0.3 * theirs.numpy(), atol=1e-5)


@st.composite
def critic_batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rewards, values, outputs, mask), [B, T] each in eighths; at least two loss tokens, tool tokens with numbers of their own."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    eighths = st.lists(st.integers(-16, 16), min_size=rows * columns, max_size=rows * columns)
    rewards, values, outputs = (np.array(draw(eighths), dtype=np.float32).reshape(rows, columns) / 8 for _ in range(3))
    flags = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = np.array(flags).reshape(rows, columns)
    mask[0, :2] = True
    return rewards, values, outputs, mask


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.97, 0.0)])
@many
@given(case=critic_batches())
def test_gae(gamma: float, lam: float, case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Returns, and advantages whitened over the loss tokens of the step; verl leaves what it likes at the other tokens."""
    rewards, values, _, mask = case
    tensors = [torch.from_numpy(x).double() for x in (rewards, values, mask)]
    advantages, returns = core_algos.compute_gae_advantage_return(*tensors, gamma, lam)
    ours = [gae(r, v, m, gamma, lam) for r, v, m in zip(rewards, values, mask, strict=True)]
    raw = [advantage for advantage, _ in ours]
    np.testing.assert_allclose(np.stack([g for _, g in ours])[mask], returns.numpy()[mask], atol=1e-5)
    white = np.stack(whiten(raw, list(mask), moments(raw, list(mask))))
    spread = np.concatenate(raw)[mask.ravel()].std()
    if spread > 1e-3:  # a constant is rounding over 1e-4 on both sides
        np.testing.assert_allclose(white[mask], advantages.numpy()[mask], atol=1e-4)


@many
@given(case=critic_batches())
def test_value_loss(case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    """The clipped square loss and its gradient; returns stand in for verl's."""
    returns, values, outputs, mask = (torch.from_numpy(x) for x in case)
    sides = [outputs.double().requires_grad_(), outputs.double().requires_grad_()]
    theirs, clipped = core_algos.compute_value_loss(sides[0], returns.double(), values.double(), mask.double(), cliprange_value=0.2)
    answer = value_loss(sides[1].flatten(), values.double().flatten(), returns.double().flatten(), mask.flatten(), "square", clip=0.2)
    ours = answer.loss_T.sum() / mask.sum()
    theirs.backward()
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    torch.testing.assert_close(sides[1].grad, sides[0].grad)
    share, count = answer.metrics["clip_share"]
    assert float(share / count) == pytest.approx(clipped.item(), abs=1e-6)
