"""How a configured stack of methods becomes one loss. `catalog.METHODS` lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import MethodConfig, ObjectiveConfig
from ..types import Metric
from .catalog import METHODS
from .objective import Aggregation, Denominators, Kind, Method, Need, Tokens, reduce_loss
from .params import build as build_params


def lookup(name: str, kinds: tuple[Kind, ...], field: str) -> Method:
    """The method of that name, of one of these kinds.

    Raises:
        ValueError: names the field, the value, and what there is.
    """
    method = METHODS.get(name)
    if method is None or method.kind not in kinds:
        known = ", ".join(sorted(m.name for m in METHODS.values() if m.kind in kinds))
        other = f" ({name} is a {method.kind})" if method else ""
        raise ValueError(f"{field}: {name!r} is not a known {' or '.join(kinds)}{other}; choose one of: {known}")
    return method


LOOP_PROVIDES: frozenset[Need] = frozenset({"old", "turns"})
"""What the training loop can give a method so far; a stack that needs more is refused before anything starts."""

REMEDIES: dict[Need, str] = {
    "old": "an old-policy forward at the start of the step",
    "turns": "the turn index of every token; collect multi-turn trajectories",
    "top_k": "the top-K log-probs of every token; have the engine return them and the actor score them",
    "uniform": "one uniform a token; pass uniform.token_uniforms",
    "router_shift": "the router's scores under the old policy; only mixture-of-experts models have them",
    "reference": "the log-probs of a frozen reference policy; name one",
}


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

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them, the objective first."""
        return (self.objective, *self.corrections, *self.penalties)

    @property
    def needs(self) -> frozenset[Need]:
        """What the forward passes and the rollout must provide."""
        return frozenset().union(*(part.needs for part in self.parts))

    def check_available(self, available: Collection[Need]) -> None:
        """Raises ValueError, before anything runs, if a method needs what this run does not provide."""
        for part in self.parts:
            for need in sorted(part.needs - set(available)):
                kind = "objective" if part is self.objective else "corrections"
                raise ValueError(f"{kind}: {part.method.name!r} needs {REMEDIES[need]}; this run has none. Provide it or choose another")

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
        for part in self.corrections:
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
    return part.method.apply(dataclasses.replace(tokens, totals=own), part.config)


def build(objective: ObjectiveConfig, corrections: Sequence[MethodConfig]) -> Stack:
    """The stack a configuration names. Penalties are listed among the corrections.

    Raises:
        ValueError: an unknown method or parameter, or one method twice.
    """
    method = lookup(objective.name, ("objective",), "objective.name")
    parts: list[Part] = []
    for i, correction in enumerate(corrections):
        field = f"corrections[{i}]"
        m = lookup(correction.name, ("correction", "penalty"), f"{field}.name")
        if any(part.method is m for part in parts):
            raise ValueError(f"{field}.name: {m.name!r} is stacked twice; its effect would be applied twice. Remove one")
        parts.append(Part(m, build_params(m.config, correction.params, f"{field}.params", m.name)))
    return Stack(
        objective=Part(method, build_params(method.config, objective.params, "objective.params", method.name)),
        corrections=tuple(part for part in parts if part.method.kind == "correction"),
        aggregation=objective.aggregation or method.aggregation,
        penalties=tuple(part for part in parts if part.method.kind == "penalty"),
    )
