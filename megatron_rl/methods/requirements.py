"""What a run can give its methods, and which stacks contradict their run. Checked before a process group or a server starts."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config, ModelFacts
from .objective import WHOLE_VOCABULARY, Need, Unit
from .params import build as build_params
from .registry import build, lookup
from .stack import Part, Stack

EXACT_VOCABULARY = 16384
"""Largest vocabulary of which all log-probs are asked for at every token: 64 KiB each from the engine, and as much beside the logits."""
REACHES: dict[Unit, tuple[str, ...]] = {"prefix": ("suffix", "sequence"), "turn": ("sequence",), "sequence": ("sequence",)}
"""What a token with probability 0 must take with it, by the unit of the objective's ratio; any reach will do for other units."""


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
    method = lookup(config.advantage.name, ("advantage",), "advantage.name")
    estimator = Part(method, build_params(method.config, config.advantage.params, "advantage.params", method.name))
    stack.check_available(provided(config, facts))
    if "turns" in estimator.needs and config.data.step_delimiter is None:
        raise ValueError(f"advantage.name: {method.name!r} needs steps: set data.step_delimiter to the text that ends one")
    for problem in _contradictions(config, facts, stack, estimator):
        raise ValueError(problem)
    return stack, estimator


def wants_critic(estimator: Part) -> bool:
    """Whether an advantage estimator learns values."""
    return estimator.method.name == "gae" or getattr(estimator.config, "critic", None) == "learned"


def _contradictions(config: Config, facts: ModelFacts, stack: Stack, estimator: Part) -> Iterator[str]:
    yield from _of_support(config, stack)
    yield from _of_vocabulary(facts, stack)
    yield from _of_groups(config, stack, estimator)
    yield from _of_rewards(config, stack, estimator)
    yield from _of_critic(config, estimator)


def _of_support(config: Config, stack: Stack) -> Iterator[str]:
    """The sampler's distribution and the trainer's must be over the same tokens."""
    rollout, restriction = config.rollout, stack.vocabulary
    prunes_alone = restriction is not None and restriction.method.name == "dvp" and restriction.config.support == "unpruned"
    if rollout.truncates and (restriction is None or prunes_alone):
        yield (
            f"rollout.top_p, top_k, min_p: {(rollout.top_p, rollout.top_k, rollout.min_p)} truncate what is sampled, but the trainer "
            "normalises over the whole vocabulary; add methods: [{name: keep_sets}]"
        )
    if prunes_alone:
        yield from _of_reach(stack)
    if restriction is None or "min_p_sampling" not in restriction.needs:
        return
    if rollout.min_p != restriction.config.rho or rollout.top_p != 1 or rollout.top_k != -1:
        yield (
            f"rollout.min_p: {rollout.min_p} must equal dvp's rho = {restriction.config.rho}, with top_p 1 and top_k -1, for both "
            "engines to prune alike; with other truncation set dvp's support to keep_sets"
        )


def _of_reach(stack: Stack) -> Iterator[str]:
    """A ratio over a prefix or a sequence is 0 from a token outside theta's support on, not at that token alone."""
    assert stack.vocabulary is not None
    objective, reach = stack.objective.method, stack.vocabulary.config.reach
    allowed = REACHES.get(objective.unit, (reach,))
    if reach not in allowed:
        yield (
            f"methods: dvp's reach {reach!r} leaves tokens whose weight is 0, because the ratio of {objective.name} is per "
            f"{objective.unit}; set it to {' or '.join(allowed)}"
        )


def _of_vocabulary(facts: ModelFacts, stack: Stack) -> Iterator[str]:
    """A sum over the whole vocabulary needs all its log-probs of every token."""
    for part in stack.parts:
        count = part.method.candidates
        if count is None or not part.needs & {"behaviour_top_k", "old_top_k"}:
            continue
        if count(part.config) == WHOLE_VOCABULARY and facts.vocab_size > EXACT_VOCABULARY:
            yield (
                f"corrections: {part.method.name!r} with source exact asks for all {facts.vocab_size} log-probs of every token, and "
                f"{EXACT_VOCABULARY} is the most that can be carried; set source to top_k, a lower bound, or sampled"
            )


def _of_groups(config: Config, stack: Stack, estimator: Part) -> Iterator[str]:
    """What compares the answers to one prompt needs several, and every mini-batch at least one."""
    rollout = config.rollout
    comparing = [name for name in ("dynamic_sampling", "popo") if stack.find(name) is not None]
    if estimator.method.name == "group" and stack.objective.method.name != "nll":
        comparing.insert(0, "group")
    if rollout.samples_per_prompt == 1 and comparing:
        yield (
            f"rollout.samples_per_prompt: 1 leaves {comparing[0]!r} nothing to compare an answer with: every advantage would be 0; raise "
            "it, or set advantage.name to gae and remove dynamic_sampling and popo"
        )
    answers = rollout.prompts_per_step * rollout.samples_per_prompt
    if config.train.mini_batches > answers:
        yield f"train.mini_batches: {config.train.mini_batches} is more than the {answers} answers of a step; lower it"


def _of_rewards(config: Config, stack: Stack, estimator: Part) -> Iterator[str]:
    """Rewards that some methods change must be those that others learn from."""
    name, overlong = estimator.method.name, stack.find("overlong")
    if overlong is not None and overlong.max_length is None and overlong.buffer > config.rollout.max_new_tokens:
        yield (
            f"methods: overlong's buffer = {overlong.buffer} exceeds rollout.max_new_tokens = {config.rollout.max_new_tokens}; DAPO's is a "
            "fifth of it"
        )
    for changing in (method for method in ("overlong", "kl_in_reward") if stack.find(method) is not None):
        if name == "step_advantage":
            yield (
                f"methods: {changing!r} changes the rewards of whole answers, but step_advantage judges prefixes by completions of their "
                "own, which it does not reach; remove it, or set advantage.name to group or gae"
            )
        if wants_critic(estimator) and config.critic.loss == "bce":
            yield (
                f"critic.loss: 'bce' learns probabilities, but {changing!r} makes rewards negative; set it to square, or remove "
                f"{changing!r}"
            )
    if config.advantage.reject_truncated and name != "group":
        yield (
            f"advantage.reject_truncated: {name} has no group statistics that a truncated answer could leave; set it to false, or "
            "advantage.name to group"
        )


def _of_critic(config: Config, estimator: Part) -> Iterator[str]:
    """A critic's settings need a critic, and its warm-up must end."""
    critic = config.critic
    if wants_critic(estimator):
        if critic.warmup_steps >= config.train.steps:
            yield (
                f"critic.warmup_steps: {critic.warmup_steps} leaves the policy none of train.steps = {config.train.steps}; lower it or "
                "raise those"
            )
        return
    for field, value in (("path", critic.path), ("warmup_steps", critic.warmup_steps)):
        if value:
            yield (
                f"critic.{field}: {value!r} needs a critic, and advantage.name = {estimator.method.name!r} has none; remove it, or take "
                "gae or step_advantage with critic: learned"
            )
