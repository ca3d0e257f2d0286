"""Advantages against those of TRL's rollout step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.methods.group import GroupConfig, group_advantages

from .trl_side import rollout

many = settings(max_examples=25, deadline=None)


@st.composite
def rewards_of_equal_groups(draw: st.DrawFn) -> tuple[list[float], int]:
    """(rewards, group size), groups one after the other; multiples of 1/8, so that an all-equal group is exactly flat in fp32."""
    size, groups = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    return [draw(st.integers(-16, 16)) / 8 for _ in range(size * groups)], size


def names(rewards: list[float], size: int) -> list[str]:
    return [f"g{i // size}" for i in range(len(rewards))]


@many
@given(case=rewards_of_equal_groups())
def test_centred_on_the_mean(case: tuple[list[float], int]) -> None:
    rewards, size = case
    theirs = rollout(None, rewards, num_generations=size, scale_rewards="none")["advantages"]
    ours = group_advantages(rewards, names(rewards, size), GroupConfig(scale_by_std=False))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)


@many
@given(case=rewards_of_equal_groups())
def test_scaled_by_the_sample_deviation(case: tuple[list[float], int]) -> None:
    """With std: sample and TRL's epsilon; the defaults differ in both (test_trl_differences)."""
    rewards, size = case
    theirs = rollout(None, rewards, num_generations=size)["advantages"].numpy()
    ours = group_advantages(rewards, names(rewards, size), GroupConfig(std="sample", eps=1e-4))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@many
@given(case=rewards_of_equal_groups(), data=st.data())
def test_answers_without_a_reward_leave_their_group(case: tuple[list[float], int], data: st.DataObject) -> None:
    """TRL's reward None is our `valid` False."""
    rewards, size = case
    valid = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    given_out = [r if keep else None for r, keep in zip(rewards, valid, strict=True)]
    theirs = rollout(None, given_out, num_generations=size, scale_rewards="none")["advantages"].numpy()
    ours = group_advantages(rewards, names(rewards, size), GroupConfig(scale_by_std=False), valid)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
