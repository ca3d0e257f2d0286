"""POPO (2606.01281): groups without reward variance are replaced by stored ones that have some. Evidence [D]; loss and buffer rules [I].

    buffer: whole groups (all answers to a prompt by one behaviour policy) with reward variance > 0, first in, first out
    step:   stale groups expire; each fresh group whose rewards are all equal is replaced by a stored one, the newest first
            while there are any; then the fresh informative groups enter the buffer, so none is used twice in one step

A stored group keeps its own rewards, hence its advantages, and its behaviour log-probs, so ratios must not treat it as on-policy (which
collapses): the paper's loss is sg[old/mu] min(r A, clip(r) A), r = theta/old, i.e. objective `ppo` with correction `tis`, old recomputed.
Staleness of 10 versions or more collapses in the paper's ablation. Inferred: buffer size, and that a group which was used may be used again
in a later step until it leaves the buffer (keep_used). Runs on the host; a group is never split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Metric, as_metric
from .dynamic_sampling import Group, is_informative
from .objective import Method
from .params import MethodParams


@dataclass(frozen=True)
class POPOConfig(MethodParams):
    """Parameters of `popo`."""

    buffer_groups: int = 256
    """Groups that each data-parallel leader stores; the oldest leave first."""
    max_staleness: int = 5
    """Weight versions between a group's oldest token and now beyond which it expires; 10 and more collapsed."""
    keep_used: bool = True
    """A group that replaced another stays in the buffer for later steps [I]; false uses each at most once more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("buffer_groups", self.buffer_groups >= 1, "must be at least 1; several steps' worth of groups is usual")
        self.require("max_staleness", self.max_staleness >= 1, "must be at least 1: a stored group is at least one version old")


def staleness(group: Group, version: int) -> int:
    """Weight versions between the oldest sampled token of the group and `version`."""
    oldest = [int(t.versions[t.loss_mask].min()) for t in group if t.loss_mask.any()]
    return version - min(oldest, default=version)


def refill(
    groups: Sequence[Group], buffer: Sequence[Group], version: int, config: POPOConfig
) -> tuple[list[Group], tuple[Group, ...], dict[str, Metric]]:
    """One step: (the groups to train on, the new buffer, metrics). As many groups as came in, in their places.

    Args:
        groups: fresh, each with all its trajectories judged.
        buffer: what the last step returned, oldest first; goes in the checkpoint.
        version: the weight version now.
    """
    live = [group for group in buffer if staleness(group, version) <= config.max_staleness]
    # Advantages are taken by group name, and every collection gives its groups new ones.
    assert not {_name(group) for group in live} & {_name(group) for group in groups}
    fresh = [group for group in groups if is_informative(group)]
    newest_first = live[::-1]
    chosen = newest_first[: len(groups) - len(fresh)]
    replacements = iter(chosen)
    batch = [group if is_informative(group) else next(replacements, group) for group in groups]
    kept = live if config.keep_used else newest_first[len(chosen) :][::-1]
    stored = (*kept, *fresh)[-config.buffer_groups :]
    ages = [staleness(group, version) for group in chosen]
    metrics = {
        "uninformative_share": as_metric(len(groups) - len(fresh), len(groups)),
        "replaced_share": as_metric(len(chosen), len(groups)),
        "expired_share": as_metric(len(buffer) - len(live), len(buffer)),
        "staleness_mean": as_metric(sum(ages), len(ages)),
        "buffer_groups": as_metric(len(stored), 1),
    }
    return batch, stored, metrics


def _name(group: Group) -> str:
    names = {trajectory.group for trajectory in group}
    assert len(names) == 1, f"one group, several names: {sorted(names)}"
    return names.pop()


METHOD = Method(
    name="popo",
    kind="data",
    config=POPOConfig,
    apply=None,
    paper="2606.01281",
    evidence="DI",
    unit="sequence",
    summary="Replaces groups without reward variance by stored informative ones",
    needs=frozenset({"recomputed_old"}),
)
