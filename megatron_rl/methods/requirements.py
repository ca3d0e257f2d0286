"""What a run can give its methods, and which stacks contradict their run. Checked before a process group or a server starts."""

from __future__ import annotations

from ..config import Config, ModelFacts
from .objective import Need, Unit
from .params import build as build_params
from .registry import build, lookup
from .stack import Part, Stack


def provided(config: Config, facts: ModelFacts) -> frozenset[Need]:
    """The needs that this configuration meets."""
    found: set[Need] = {"old", "behaviour_top_k", "uniform"}
    recomputed = config.train.old_policy == "recomputed"
    conditions: dict[Need, bool] = {
        "recomputed_old": recomputed,
        "old_top_k": recomputed,
        "router_shift": recomputed and facts.is_moe,
        "turns": config.data.step_delimiter is not None,
        "reference": config.reference.path is not None,
        "keep_sets": config.rollout.truncates,
        "min_p_sampling": config.rollout.min_p > 0,
    }
    return frozenset(found | {need for need, met in conditions.items() if met})


def configured(config: Config, facts: ModelFacts) -> tuple[Stack, Part]:
    """The stack and the advantage estimator of a configuration.

    Raises:
        ValueError: an unknown method or parameter, or methods that contradict each other or the run; names the field and the remedy.
    """
    stack = build(config.objective, config.corrections, config.methods)
    stack.check_available(provided(config, facts))
    _check_support(config, stack)
    method = lookup(config.advantage.name, ("advantage",), "advantage.name")
    estimator = Part(method, build_params(method.config, config.advantage.params, "advantage.params", method.name))
    if "turns" in estimator.needs and config.data.step_delimiter is None:
        raise ValueError(f"advantage.name: {method.name!r} needs steps: set data.step_delimiter to the text that ends one")
    if config.advantage.reject_truncated and method.name != "group":
        raise ValueError(
            f"advantage.reject_truncated: {method.name} has no group statistics that a truncated answer could leave; set it to false, "
            "or advantage.name to group"
        )
    return stack, estimator


def _check_support(config: Config, stack: Stack) -> None:
    """The sampler's distribution and the trainer's must be over the same tokens."""
    rollout, restriction = config.rollout, stack.vocabulary
    prunes_alone = restriction is not None and restriction.method.name == "dvp" and restriction.config.support == "unpruned"
    if rollout.truncates and (restriction is None or prunes_alone):
        raise ValueError(
            f"rollout.top_p, top_k, min_p: {(rollout.top_p, rollout.top_k, rollout.min_p)} truncate what is sampled, but the trainer "
            "normalises over the whole vocabulary; add methods: [{name: keep_sets}]"
        )
    if prunes_alone:
        _check_reach(stack)
    if restriction is None or "min_p_sampling" not in restriction.needs:
        return
    if rollout.min_p != restriction.config.rho or rollout.top_p != 1 or rollout.top_k != -1:
        raise ValueError(
            f"rollout.min_p: {rollout.min_p} must equal dvp's rho = {restriction.config.rho}, with top_p 1 and top_k -1, for both "
            "engines to prune alike; with other truncation set dvp's support to keep_sets"
        )


REACHES: dict[Unit, tuple[str, ...]] = {"prefix": ("suffix", "sequence"), "turn": ("sequence",), "sequence": ("sequence",)}
"""What a token with probability 0 must take with it, by the unit of the objective's ratio; any reach will do for other units."""


def _check_reach(stack: Stack) -> None:
    """A ratio over a prefix or a sequence is 0 from a token outside theta's support on, not at that token alone."""
    assert stack.vocabulary is not None
    objective, reach = stack.objective.method, stack.vocabulary.config.reach
    allowed = REACHES.get(objective.unit, (reach,))
    if reach not in allowed:
        raise ValueError(
            f"methods: dvp's reach {reach!r} leaves tokens whose weight is 0, because the ratio of {objective.name} is per {objective.unit}; "
            f"set it to {' or '.join(allowed)}"
        )
