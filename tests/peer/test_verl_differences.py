"""Every known difference from verl 0.9.1, each with an input that shows it; docs/peers.md says whose it is and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.methods import estimators
from megatron_rl.methods.gae import moments, whiten
from megatron_rl.methods.group import GroupConfig, group_advantages

from .batches import PeerLoss, one, padded, peer_outcome
from .ours import Seq, evaluate, stack
from .verl_side import actor_config, bypass, core_algos, correction, policy_loss

SUM = "seq-mean-token-sum"
NAN = float("nan")


def ratios(*values: float) -> Seq:
    """old/mu of each token as given; theta = old; A = 1."""
    old = [-1.0 + math.log(v) for v in values]
    return one(old, old, [-1.0] * len(values))


def kept(name: str, params: dict[str, Any], s: Seq) -> list[bool]:
    """Which tokens one of our masks keeps."""
    grads = evaluate(stack("policy_gradient", {"weight": "none"}, [(name, params)], SUM), [s]).grads[0]
    return (grads != 0).tolist()


def verl_kept(s: Seq, rollout_rs: str, threshold: Any) -> list[bool]:
    return (correction(padded([s]), rollout_rs=rollout_rs, rollout_rs_threshold=threshold)[1][0] > 0).tolist()


def losses(ours: Any, theirs: PeerLoss, batch: list[Seq]) -> tuple[float, float]:
    """(ours, verl's)."""
    return evaluate(ours, batch).loss, peer_outcome(theirs, batch)[0]


def gradients(ours: Any, theirs: PeerLoss, batch: list[Seq]) -> tuple[Tensor, Tensor]:
    """(ours, verl's) at the first sequence."""
    return evaluate(ours, batch).grads[0], peer_outcome(theirs, batch)[1][0]


def test_k1_bounds_are_bounds_of_the_inverse_ratio_in_verl() -> None:
    """0.6_1.4 bounds mu/old there: 1/1.5 = 0.67 is inside, 1/0.65 = 1.54 is not. Ours bounds old/mu, as documented by both."""
    s = ratios(1.5, 0.65)
    assert verl_kept(s, "token_k1", "0.6_1.4") == [True, False]
    assert kept("mis_po", {"token_low": 0.6, "token_high": 1.4, "geo_low": 0.0, "geo_high": 9.0, "pair": "old/mu"}, s) == [False, True]
    for option, level in (("seq_mean_k1", "geometric"), ("seq_sum_k1", "sequence")):
        for value, theirs in ((1.5, True), (0.65, False)):
            s = ratios(value)
            assert verl_kept(s, option, "0.6_1.4") == [theirs]
            assert kept("geo_rs", {"low": 0.6, "high": 1.4, "level": level}, s) == [not theirs]


def test_verl_clamps_each_log_ratio_before_it_sums() -> None:
    """Log-ratios 25 and -24: their sum is 1, a ratio of 2.7; verl's is 20 - 20 = 0, a ratio of 1, and the sequence passes [0.5, 2]."""
    s = one([-1.0, -25.0], [-1.0, -25.0], [-26.0, -1.0])
    assert verl_kept(s, "seq_sum_k1", "0.5_2.0") == [True, True]
    assert kept("geo_rs", {"low": 0.5, "high": 2.0, "level": "sequence"}, s) == [False, False]


def test_rejected_tokens_leave_verls_denominator() -> None:
    """Two tokens of loss -log theta = 1, one rejected: 1/2 with ours, 1/1 with verl unless its trainer hands it the whole batch's count."""
    s = one([-1.0, -1.0], [-1.0, -1.0], [-1.0, -4.0])
    rollout = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    ours = stack("policy_gradient", {"weight": "none"}, [("mis_po", {"geo_low": 0.0, "geo_high": 99.0, "pair": "old/mu"})], "token-mean")
    assert losses(ours, policy_loss("gpg", "token-mean", rollout=rollout, whole_batch=False), [s]) == pytest.approx((0.5, 1.0))
    assert losses(ours, policy_loss("gpg", "token-mean", rollout=rollout), [s]) == pytest.approx((0.5, 0.5))


def test_a_sequences_own_length_shrinks_in_verl() -> None:
    """As above with the mean over each sequence's tokens: verl divides by the tokens left, whatever it is handed."""
    s = one([-1.0, -1.0], [-1.0, -1.0], [-1.0, -4.0])
    rollout = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    ours = stack(
        "policy_gradient", {"weight": "none"}, [("mis_po", {"geo_low": 0.0, "geo_high": 99.0, "pair": "old/mu"})], "seq-mean-token-mean"
    )
    assert losses(ours, policy_loss("gpg", "seq-mean-token-mean", rollout=rollout), [s]) == pytest.approx((0.5, 1.0))


def test_verl_fails_when_icepop_drops_everything() -> None:
    """One token at ratio 0.4 under bounds 0.5_5: its effective-sample-size metric divides by zero. Ours is a loss of 0."""
    s = ratios(0.4)
    with pytest.raises(ZeroDivisionError):
        correction(padded([s]), rollout_is="token", rollout_is_threshold="0.5_5.0")
    outcome = evaluate(stack("ppo", {}, [("icepop", {})]), [s])
    assert outcome.loss == 0 and outcome.grads[0].tolist() == [0]


def test_a_batch_without_loss_tokens_is_nan_in_verl() -> None:
    s = one([-1.0], [-1.0], mask=[False])
    ours, theirs = losses(stack("ppo"), policy_loss("vanilla", "token-mean", whole_batch=False), [s])
    assert ours == 0 and math.isnan(theirs)
    with pytest.raises(ValueError, match="at least one valid token"):
        correction(padded([s]), rollout_is="token")


@pytest.mark.parametrize(("ours", "theirs", "aggregation"), [("ppo", "vanilla", SUM), ("gspo", "gspo", "token-mean")])
def test_nan_at_a_tool_token_is_nan_in_verl(ours: str, theirs: str, aggregation: str) -> None:
    """An engine gives no log-prob for a tool token. Ours selects with the mask; verl multiplies, so it has to be filled in first."""
    s = dataclasses.replace(one([-1.0, -2.0], [-1.0, -2.0], mask=[True, False]), old=torch.tensor([-1.0, NAN], dtype=torch.float64))
    outcome = evaluate(stack(ours, aggregation=aggregation), [s])
    assert outcome.loss == -1 and outcome.grads[0].tolist() == [-1, 0]
    assert math.isnan(peer_outcome(policy_loss(theirs, aggregation), [s])[0])


def test_gspo_stops_at_a_mean_log_ratio_of_10_in_verl() -> None:
    """theta/old = e^12 with A = -1: loss e^12 with a gradient; verl's e^10 and no gradient. Ours clamps at 20, as verl's own PPO does."""
    s = one([-1.0], [-13.0], advantage=-1.0)
    theirs = policy_loss("gspo", "seq-mean-token-mean")
    assert losses(stack("gspo"), theirs, [s]) == pytest.approx((math.exp(12), math.exp(10)))
    ours, verl = gradients(stack("gspo"), theirs, [s])
    assert ours.item() == pytest.approx(math.exp(12)) and verl.item() == 0


def test_gmpo_is_not_clamped_in_verl() -> None:
    """Mean log-ratio 25 with A = -1, which GMPO does not clip: e^25, and e^20 with ours."""
    s = one([-1.0], [-26.0], advantage=-1.0)
    theirs = policy_loss("geo_mean", "unused", clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert losses(stack("gmpo"), theirs, [s]) == pytest.approx((math.exp(20), math.exp(25)))


def test_gmpo_counts_sequences_without_loss_tokens_in_verl() -> None:
    """One sequence of loss -1 and an empty one: the mean over sequences with loss tokens is -1, over rows -1/2."""
    batch = [one([-1.0], [-1.0]), one([-1.0], [-1.0], mask=[False])]
    assert losses(stack("gmpo"), policy_loss("geo_mean", "unused"), batch) == pytest.approx((-1.0, -0.5))


def test_gmpo_averages_token_weights_geometrically_in_verl() -> None:
    """Weights 0.25 and 1 on a sequence of loss -1: ours multiplies token by token, -(0.25 + 1)/2; verl -sqrt(0.25)."""
    s = ratios(0.25, 1.0)
    theirs = policy_loss("geo_mean", "unused", rollout={"rollout_is": "token"})
    assert losses(stack("gmpo", {}, [("tis", {})]), theirs, [s]) == pytest.approx((-0.625, -0.5))


def test_sapo_ignores_the_aggregation_it_is_given_in_verl() -> None:
    """On-policy, A = 1 and 3 tokens against A = -1 and 1: the token mean is -2(3 - 1/1.05)/4; per sequence -2(1 - 1/1.05)/2."""
    batch = [one([-1.0] * 3, [-1.0] * 3), one([-1.0], [-1.0], advantage=-1.0)]
    ours, theirs = losses(stack("sapo", aggregation="token-mean"), policy_loss("sapo", "token-mean"), batch)
    assert (ours, theirs) == pytest.approx((-2 * (3 - 1 / 1.05) / 4, -2 * (1 - 1 / 1.05) / 2))


def test_k3_stops_at_10_in_verl() -> None:
    """log ref - log theta = 3: e^3 - 4 = 16.1 with gradient 1 - e^3; verl's 10 has none, just where the policy is furthest away."""
    d = torch.tensor([3.0], dtype=torch.float64)
    assert estimators.k3(d).item() == pytest.approx(math.exp(3) - 4)
    logp = torch.tensor([-4.0], dtype=torch.float64, requires_grad=True)
    theirs = core_algos.kl_penalty(logp, torch.tensor([-1.0], dtype=torch.float64), "k3")
    theirs.sum().backward()
    assert theirs.item() == 10 and logp.grad is not None and logp.grad.item() == 0


def test_dppo_truncates_at_3_by_default_in_verl() -> None:
    """Its losses mean 20 (`config.get("clip_ratio_c", 20.0)`), but the field exists in ActorConfig with PPO's 3, so 20 never comes."""
    assert actor_config().get("clip_ratio_c", 20.0) == 3.0
    s = one([-2.0], [-2.0 - math.log(8)], advantage=-1.0)
    ours, theirs = gradients(
        stack("dppo", aggregation="token-mean"),
        policy_loss("dppo_tv", "token-mean", base="mu", clip_ratio_low=0.15, clip_ratio_high=0.15),
        [s],
    )
    assert (ours.item(), theirs.item()) == pytest.approx((8.0, 3.0))


def test_effective_sample_size_of_sequence_weights() -> None:
    """Weights 2 (three tokens) and 1 (one token). Ours counts sequences, 3^2/(2*5) = 0.9; verl tokens, 7^2/(4*13) = 0.942."""
    third = [-1.0 + math.log(2) / 3] * 3
    batch = [one(third, third, [-1.0] * 3), one([-1.0], [-1.0])]
    ours = evaluate(stack("policy_gradient", {}, [("snis", {"cap": 4.0})]), batch).metrics["snis/effective_share"]
    theirs = correction(padded(batch), rollout_is="sequence", rollout_is_threshold=4.0)[2]["rollout_is_eff_sample_size"]
    assert (ours, theirs) == pytest.approx((0.9, 49 / 52), rel=1e-6)


def advantages(estimator: str, rewards: list[float], **options: object) -> list[float]:
    """verl's, all in one group."""
    token_rewards = torch.tensor(rewards, dtype=torch.float32).unsqueeze(1)
    index = np.array(["g"] * len(rewards), dtype=object)
    answer, _ = core_algos.get_adv_estimator_fn(estimator)(token_rewards, torch.ones(len(rewards), 1), index=index, **options)
    return answer[:, 0].tolist()


def test_deviation_is_the_samples_in_verl() -> None:
    """Rewards 1 and 0: the deviation is 1/2 over n = 2, so +-1 (GRPO 2402.03300); over n - 1 it is 0.707, so +-0.707."""
    assert group_advantages([1.0, 0.0], ["g", "g"], GroupConfig()).tolist() == pytest.approx([1, -1], abs=1e-5)
    assert advantages("grpo", [1.0, 0.0]) == pytest.approx([0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize(("estimator", "theirs"), [("grpo", 3.0), ("grpo_vectorized", 3.0), ("rloo", 3.0), ("rloo_vectorized", 0.0)])
def test_a_lone_answer_gets_its_raw_reward_in_verl(estimator: str, theirs: float) -> None:
    """A group of one has nothing to compare with: 0 in ours. verl's two forms of RLOO disagree with each other."""
    baseline = "leave-one-out" if "rloo" in estimator else "mean"
    assert group_advantages([3.0], ["g"], GroupConfig(baseline=baseline)).tolist() == [0]  # type: ignore[arg-type]
    assert advantages(estimator, [3.0]) == pytest.approx([theirs], abs=1e-5)


def test_rounding_of_equal_rewards_is_divided_by_epsilon_in_verl() -> None:
    """Seven rewards of 0.1 in fp32: their mean is one ulp off, 7e-9, over the deviation plus 1e-6. Ours is exactly 0."""
    assert group_advantages([0.1] * 7, ["g"] * 7, GroupConfig()).tolist() == [0] * 7
    theirs = advantages("grpo", [0.1] * 7)
    assert all(0 < abs(a) < 0.02 for a in theirs), theirs


def test_bypass_ppo_clip_takes_no_weights() -> None:
    """rollout_is asked for, loss_type ppo_clip: verl drops the weights (they would count twice). Ours multiplies what it is told to."""
    s = one([-1.0 + math.log(1.1)], [-1.0])
    theirs = bypass("ppo_clip", "token-mean", rollout={"rollout_is": "token"})
    ours = stack("ppo", {}, [("tis", {"pair": "theta/mu"})])
    assert losses(ours, theirs, [s]) == pytest.approx((-1.21, -1.1))


def test_gae_of_a_single_loss_token_fails_in_verl() -> None:
    """It has no sample variance to whiten with: verl raises, ours is 0."""
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match="The sum of the mask is one"):
        core_algos.compute_gae_advantage_return(x, x, x, 1.0, 1.0)
    advantages, mask = [np.ones(1, np.float32)], [np.ones(1, dtype=bool)]
    assert whiten(advantages, mask, moments(advantages, mask))[0].tolist() == [0]
