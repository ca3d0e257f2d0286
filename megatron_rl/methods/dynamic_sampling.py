"""Dynamic sampling of DAPO (2503.14476): draw on until enough groups have reward variance. Evidence [D][C].

    keep groups whose rewards differ, until `wanted` are there; after max_rounds rounds the rest is filled with what there is

A group whose rewards are all equal has advantage 0 and only dilutes the token mean. DAPO draws rounds of 1536 prompts for 512. verl stops
with an error when max_num_gen_batches rounds do not suffice; here the step goes on with uninformative groups in the places left over, so
that the batch keeps its size. Runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Trajectory
from .objective import Method
from .params import MethodParams

Group = tuple[Trajectory, ...]
"""All answers to one prompt by one behaviour policy; `Trajectory.group` is equal in all."""


@dataclass(frozen=True)
class DynamicSamplingConfig(MethodParams):
    """Parameters of `dynamic_sampling`."""

    max_rounds: int = 3
    """Rounds of sampling in one step, the first included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("max_rounds", self.max_rounds >= 2, "must be at least 2: the first round is drawn anyway")


def is_informative(group: Group) -> bool:
    """Whether the group's rewards differ.

    Raises:
        ValueError: a trajectory was not judged.
    """
    rewards = []
    for trajectory in group:
        if trajectory.reward is None:
            raise ValueError(f"reward: a trajectory of group {trajectory.group!r} has none; judge it first")
        rewards.append(trajectory.reward)
    return max(rewards) > min(rewards)


def by_group(trajectories: Sequence[Trajectory]) -> list[Group]:
    """The trajectories in groups, in the order in which the groups first appear."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.group, []).append(trajectory)
    return [tuple(members) for members in found.values()]


def missing(groups: Sequence[Group], wanted: int) -> int:
    """How many informative groups another round should still bring."""
    return max(0, wanted - sum(is_informative(group) for group in groups))


def select(groups: Sequence[Group], wanted: int) -> list[Group]:
    """At most `wanted` of all rounds' groups: informative ones first, then others, each in the order they came in."""
    informative = [group for group in groups if is_informative(group)]
    others = [group for group in groups if not is_informative(group)]
    return [*informative, *others][:wanted]


METHOD = Method(
    name="dynamic_sampling",
    kind="data",
    config=DynamicSamplingConfig,
    apply=None,
    paper="2503.14476",
    evidence="DC",
    unit="sequence",
    summary="Samples on until enough groups have rewards that differ",
)
