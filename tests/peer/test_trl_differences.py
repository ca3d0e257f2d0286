"""Every known difference from TRL 1.16.0, each with an input that shows it; docs/peers.md says whose it is and why."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron_rl.methods.group import GroupConfig, group_advantages

from .batches import PeerLoss, one, peer_outcome
from .ours import Seq, evaluate, stack
from .trl_side import loss, rollout

NAN = float("nan")


def losses(ours: Any, theirs: PeerLoss, batch: list[Seq]) -> tuple[float, float]:
    """(ours, TRL's)."""
    return evaluate(ours, batch).loss, peer_outcome(theirs, batch)[0]


@pytest.mark.parametrize(("name", "options"), [("grpo", {}), ("gspo", {"importance_sampling_level": "sequence"})])
def test_log_ratios_are_not_clamped_in_trl(name: str, options: dict[str, Any]) -> None:
    """theta/old = e^25 with A = -1, which no clip bounds: TRL's loss is e^25, ours e^20, the guard of verl and the rest."""
    s = one([-1.0], [-26.0], advantage=-1.0)
    assert losses(stack(name), loss("grpo", **options), [s]) == pytest.approx((math.exp(20), math.exp(25)))


def test_token_gradient_beyond_the_clamp() -> None:
    """The same token: none with ours (and verl), e^25 with TRL."""
    s = one([-1.0], [-26.0], advantage=-1.0)
    assert evaluate(stack("grpo"), [s]).grads[0].item() == 0
    assert peer_outcome(loss("grpo"), [s])[1][0].item() == pytest.approx(math.exp(25))


@pytest.mark.parametrize(("name", "loss_type", "each"), [("grpo", "grpo", -1.0), ("dr_grpo", "dr_grpo", -1 / 7), ("sapo", "sapo", -2.0)])
def test_sequences_without_loss_tokens_count_in_trl(name: str, loss_type: str, each: float) -> None:
    """One on-policy sequence and one whose tokens are all masked (a truncated answer, say): TRL divides by two rows."""
    batch = [one([-1.0], [-1.0]), one([-1.0], [-1.0], mask=[False])]
    assert losses(stack(name), loss(loss_type), batch) == pytest.approx((each, each / 2))


def test_nan_at_a_tool_token_is_nan_in_trl() -> None:
    """Ours selects with the mask, TRL multiplies. Only the engine's own log-probs may be NaN there; it gives those a ratio of 1."""
    s = dataclasses.replace(one([-1.0, -2.0], [-1.0, -2.0], mask=[True, False]), old=torch.tensor([-1.0, NAN], dtype=torch.float64))
    ours, theirs = losses(stack("grpo"), loss("grpo"), [s])
    assert ours == -1 and math.isnan(theirs)


def test_bnpo_is_a_mean_of_micro_batch_means() -> None:
    """Micro-batches of 1 token (loss -1) and of 3 tokens (loss +1 each): the global token mean is 1/2, the mean of TRL's means 0.

    Its dapo, cispo and vespo divide by a global count, as ours do.
    """
    batch = [one([-1.0], [-1.0]), one([-1.0] * 3, [-1.0] * 3, advantage=-1.0)]
    assert evaluate(stack("grpo", aggregation="token-mean"), batch).loss == pytest.approx(0.5)
    theirs = [peer_outcome(loss("bnpo", current_gradient_accumulation_steps=2), [s])[0] for s in batch]
    assert sum(theirs) == pytest.approx(0.0)


def test_vespo_clamps_each_log_ratio_before_it_sums() -> None:
    """Log-ratios 25 and -24 sum to 1: phi(e) = e^(3 + 2 - 3e). TRL sums 20 and -20: phi(1) = 1."""
    s = one([-1.0, -25.0], [-26.0, -1.0])
    ours = evaluate(stack("vespo", {"anchor": "theta/old"}), [s]).metrics["vespo/weight_mean"]
    assert ours == pytest.approx(math.exp(5 - 3 * math.e))
    assert peer_outcome(loss("vespo"), [s])[0] == pytest.approx(26 / 2)  # phi = 1: the mean of -log theta


def test_vespo_multiplies_truncated_weights_in_trl() -> None:
    """old/mu = 4, theta = old. Ours has w = theta/mu = 4; TRL's old/mu was cut at 2 before: phi(w) = e^(3 + 2 log w - 3 w)."""
    s = one([-1.0], [-1.0], [-1.0 - math.log(4)])
    s = dataclasses.replace(s, **{k: getattr(s, k).float() for k in ("logp", "old", "mu", "reference", "advantages")})
    theirs = loss("vespo", use_vllm=True, vllm_importance_sampling_clip_max=2.0)
    expected = [math.exp(3 + 2 * math.log(w) - 3 * w) for w in (4, 2)]
    assert losses(stack("vespo"), theirs, [s]) == pytest.approx(tuple(expected), rel=1e-5)


def test_deviation_is_the_samples_in_trl() -> None:
    """Rewards 1 and 0: +-1 over the population deviation 1/2 (GRPO 2402.03300), +-0.707 over the sample deviation."""
    assert group_advantages([1.0, 0.0], ["g", "g"], GroupConfig()).tolist() == pytest.approx([1, -1], abs=1e-5)
    assert rollout(None, [1.0, 0.0])["advantages"].tolist() == pytest.approx([0.7071, -0.7071], abs=2e-4)


def test_epsilon_of_the_deviation_is_larger_in_trl() -> None:
    """Rewards +-1e-4: with 1e-6 ours is 100/101, with 1e-4 TRL's is 1/(sqrt 2 + 1)."""
    assert group_advantages([1e-4, -1e-4], ["g", "g"], GroupConfig())[0] == pytest.approx(100 / 101, rel=1e-4)
    assert rollout(None, [1e-4, -1e-4])["advantages"][0].item() == pytest.approx(1 / (math.sqrt(2) + 1), rel=1e-4)
