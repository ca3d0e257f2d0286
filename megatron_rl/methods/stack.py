"""An objective, the corrections and penalties on it, and the methods around it, evaluated together on micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..types import Metric
from .objective import WHOLE_VOCABULARY, Aggregation, Denominators, Kind, Method, Need, Tokens, reduce_loss

REMEDIES: dict[Need, str] = {
    "old": "log-probs of the policy that the step started from",
    "recomputed_old": "the trainer's own log-probs at the start of the step: set train.old_policy to recomputed, or anchor it at mu",
    "turns": "the turn of every token: set data.step_delimiter to split answers into steps",
    "behaviour_top_k": "the engine's likeliest tokens at every position",
    "old_top_k": "the likeliest tokens at the start of the step: set train.old_policy to recomputed",
    "uniform": "one uniform a token",
    "router_shift": "the router's scores: only mixture-of-experts models have them, and train.old_policy must be recomputed",
    "reference": "a frozen reference policy: set reference.path",
    "min_p_sampling": "an engine that prunes alike: set rollout.min_p to the method's rho, and rollout.keep_sets to hold the support",
    "keep_sets": "a sampler that truncates: set rollout.top_p, top_k or min_p, and rollout.keep_sets to the most tokens they leave",
}
"""What a user does about a need that a configuration does not meet."""

STACKED: dict[Kind, str] = {
    "objective": "objective.name",
    "correction": "corrections",
    "penalty": "corrections",
    "advantage": "advantage.name",
}
"""The configuration field a method of each kind is listed in; `methods` for kinds that are not named here."""


@dataclass(frozen=True)
class Part:
    """A method with its validated parameters."""

    method: Method
    config: Any

    @property
    def needs(self) -> frozenset[Need]:
        """What this method, configured so, must be given."""
        return self.method.needs(self.config) if callable(self.method.needs) else self.method.needs


@dataclass(frozen=True)
class StackLoss:
    """One micro-batch's share of the loss."""

    loss: Tensor
    """Scalar with gradient; the sum over micro-batches and ranks is the loss."""
    metrics: dict[str, Metric]
    """As "method/name"."""
    clipped_loss: Tensor | None
    """Scalar whose gradient norm `Stack.gradient_divisor` wants; needs a backward of its own, into scratch gradients."""


@dataclass(frozen=True)
class Stack:
    """An objective and the corrections and penalties on top of it, ready to be evaluated on micro-batches."""

    objective: Part
    corrections: tuple[Part, ...]
    aggregation: Aggregation
    penalties: tuple[Part, ...] = ()
    vocabulary: Part | None = None
    """The restriction of every distribution to a part of the vocabulary; it masks tokens like a correction."""
    others: tuple[Part, ...] = ()
    """Data-, step- and schedule-level methods: the loop asks for them by name, the loss does not know them."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, the objective first."""
        vocabulary = () if self.vocabulary is None else (self.vocabulary,)
        return (self.objective, *self.corrections, *self.penalties, *vocabulary, *self.others)

    @property
    def needs(self) -> frozenset[Need]:
        """What the forward passes and the rollout must provide."""
        return frozenset().union(*(part.needs for part in self.parts))

    def find(self, name: str) -> Any | None:
        """The parameters of that data-, step- or schedule-level method, None where it is not in the stack."""
        return next((part.config for part in self.others if part.method.name == name), None)

    def candidates(self, need: Literal["behaviour_top_k", "old_top_k"], vocab_size: int) -> int:
        """How many of a policy's likeliest tokens the stack wants at each position; 0 for none."""
        wanted = [part.method.candidates(part.config) for part in self.parts if need in part.needs and part.method.candidates]
        return min(vocab_size, max((vocab_size if k == WHOLE_VOCABULARY else k for k in wanted), default=0))

    def check_available(self, available: Collection[Need]) -> None:
        """Raises ValueError, before anything runs, if a method needs what this run does not provide."""
        for part in self.parts:
            for need in sorted(part.needs - set(available)):
                field = "objective" if part is self.objective else STACKED.get(part.method.kind, "methods")
                raise ValueError(f"{field}: {part.method.name!r} needs {REMEDIES[need]}")

    @property
    def has_statistics(self) -> bool:
        """Whether a pre-pass over the mini-batch is needed, with theta's log-probs of every micro-batch."""
        return any(part.method.statistics for part in self.parts)

    @property
    def has_clipped_loss(self) -> bool:
        """Whether the step needs the second backward of `StackLoss.clipped_loss`."""
        return self.objective.method.gradient_divisor is not None

    def gradient_divisor(self, clipped_gradient_norm: float) -> float:
        """What the step's gradient is divided by, given the global norm of the gradient of `clipped_loss`."""
        divisor = self.objective.method.gradient_divisor
        return 1.0 if divisor is None else divisor(clipped_gradient_norm, self.objective.config)

    def statistics(self, tokens: Tokens) -> dict[str, Tensor]:
        """Additive statistics of one micro-batch, of every method in the stack; keys are "method/name".

        Sum them over the micro-batches of the mini-batch and over data- and context-parallel ranks, and hand the sums to every
        `Tokens.of` of that mini-batch as `totals`.
        """
        with torch.no_grad():
            return {
                f"{part.method.name}/{key}": value
                for part in self.parts
                if part.method.statistics
                for key, value in part.method.statistics(tokens, part.config).items()
            }

    def evaluate(self, tokens: Tokens, over: Denominators) -> StackLoss:
        """This micro-batch's share of the loss, with every method's metrics.

        Rejected tokens stay in the denominator (papers.md 1.5: the rule of TRM, slime, AReaL and IcePop).
        """
        answer = _apply(self.objective, tokens)
        metrics = _named(self.objective, answer.metrics)
        weight_T = torch.ones_like(answer.loss_T).detach()
        keep_T = tokens.mask_T
        for part in (*self.corrections, *(() if self.vocabulary is None else (self.vocabulary,))):
            correction = _apply(part, tokens)
            weight_T = weight_T * correction.weight_T.detach()
            keep_T = keep_T & correction.keep_T
            metrics |= _named(part, correction.metrics)

        def reduced(loss_T: Tensor) -> Tensor:
            return reduce_loss(torch.where(keep_T, weight_T * loss_T, 0.0), tokens.segments, self.aggregation, over)

        loss = reduced(answer.loss_T)
        for part in self.penalties:
            penalty = _apply(part, tokens)
            loss = loss + reduce_loss(penalty.loss_T, tokens.segments, self.aggregation, over)
            metrics |= _named(part, penalty.metrics)
        return StackLoss(loss, metrics, None if answer.clipped_loss_T is None else reduced(answer.clipped_loss_T))

    def loss(self, tokens: Tokens, over: Denominators) -> tuple[Tensor, dict[str, Metric]]:
        """`evaluate` for stacks that need no second backward: (loss, metrics)."""
        answer = self.evaluate(tokens, over)
        return answer.loss, answer.metrics


def _named(part: Part, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    return {f"{part.method.name}/{name}": value for name, value in metrics.items()}


def _apply(part: Part, tokens: Tokens) -> Any:
    """The method's answer, given its own totals without their prefix."""
    prefix = f"{part.method.name}/"
    own = {k.removeprefix(prefix): v for k, v in tokens.totals.items() if k.startswith(prefix)}
    assert part.method.apply is not None, "only objectives, corrections, penalties and vocabulary restrictions are part of a loss"
    return part.method.apply(dataclasses.replace(tokens, totals=own), part.config)
