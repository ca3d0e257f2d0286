"""What a method sees of one micro-batch, and the two ways a detached statistic becomes a weight.

Legend: T positions, S sequences, K candidates of the top-K. Policies: mu sampled, old is the trainer at the start of the step,
theta is the trainer now. Log-ratios are natural, in fp32 or better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..types import Metric, as_metric
from .segments import Segments

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, the guard found in all public code (papers.md section 1.1)."""

Pair = Literal["theta/old", "theta/mu", "old/mu"]
"""Which ratio a threshold looks at: staleness inside a step, behaviour to current, or the engine gap."""


@dataclass(frozen=True)
class TopK:
    """The likeliest K tokens of the policy in a ratio's denominator, scored by it and by theta. Detached.

    A position whose row is not of this kind (prompt, padding) may hold anything.
    """

    logp_TK: Tensor
    """fp32 log theta of each candidate."""
    base_logp_TK: Tensor
    """fp32 log of the policy that chose them."""
    has_label_T: Tensor
    """bool, the label is among the candidates."""


@dataclass(frozen=True)
class Tokens:
    """What a method sees of one micro-batch. Every [T] tensor is 0 where mask_T is False, so nothing leaks out of padding."""

    logp_T: Tensor
    """fp32 log theta(label); carries the gradient."""
    old_logp_T: Tensor
    """fp32 log old(label), detached."""
    behaviour_logp_T: Tensor
    """fp32 log mu(label), detached."""
    advantages_T: Tensor
    """fp32, detached."""
    mask_T: Tensor
    """bool, the loss mask."""
    segments: Segments
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums over the whole mini-batch of what the method's `statistics` returned for each micro-batch."""
    behaviour_top_k: TopK | None = None
    """Chosen by mu; for methods that need "behaviour_top_k"."""
    old_top_k: TopK | None = None
    """Chosen by old; for methods that need "old_top_k"."""
    uniform_T: Tensor | None = None
    """fp32 in [0, 1), one draw a token (`uniform.token_uniforms`); for methods that need "uniform"."""
    router_shift_T: Tensor | None = None
    """fp32 >= 0, mean over layers and experts of |log router score theta / old|; for methods that need "router_shift"."""
    reference_logp_T: Tensor | None = None
    """fp32 log-probs of a frozen reference policy; for methods that need "reference"."""
    inside_T: Tensor | None = None
    """bool, the label is in the support that theta is restricted to; for vocabulary restrictions."""
    kept_mass_T: Tensor | None = None
    """fp32, theta's probability of that support before it was renormalised."""

    @staticmethod
    def of(
        logp_T: Tensor,
        old_logp_T: Tensor,
        behaviour_logp_T: Tensor,
        advantages_T: Tensor,
        segments: Segments,
        totals: Mapping[str, Tensor] | None = None,
        *,
        behaviour_top_k: TopK | None = None,
        old_top_k: TopK | None = None,
        uniform_T: Tensor | None = None,
        router_shift_T: Tensor | None = None,
        reference_logp_T: Tensor | None = None,
        inside_T: Tensor | None = None,
        kept_mass_T: Tensor | None = None,
    ) -> Tokens:
        """Selects with the loss mask, casts to fp32 (fp64 stays) and detaches everything but theta's log-probs."""
        mask_T = segments.mask_T

        def clean(x: Tensor) -> Tensor:
            x = x if x.dtype == torch.float64 else x.float()
            return torch.where(mask_T if x.ndim == 1 else mask_T[:, None], x, torch.zeros_like(x))

        def optional(x: Tensor | None) -> Tensor | None:
            return None if x is None else clean(x).detach()

        def clean_top_k(top_k: TopK | None) -> TopK | None:
            if top_k is None:
                return None
            return TopK(clean(top_k.logp_TK).detach(), clean(top_k.base_logp_TK).detach(), top_k.has_label_T & mask_T)

        return Tokens(
            logp_T=clean(logp_T),
            old_logp_T=clean(old_logp_T).detach(),
            behaviour_logp_T=clean(behaviour_logp_T).detach(),
            advantages_T=clean(advantages_T).detach(),
            mask_T=mask_T,
            segments=segments,
            totals=dict(totals or {}),
            behaviour_top_k=clean_top_k(behaviour_top_k),
            old_top_k=clean_top_k(old_top_k),
            uniform_T=optional(uniform_T),
            router_shift_T=optional(router_shift_T),
            reference_logp_T=optional(reference_logp_T),
            inside_T=None if inside_T is None else inside_T & mask_T,
            kept_mass_T=optional(kept_mass_T),
        )

    @property
    def log_ratio_T(self) -> Tensor:
        """l = log theta - log old: staleness inside a step. Carries the gradient."""
        return self.logp_T - self.old_logp_T

    @property
    def drift_T(self) -> Tensor:
        """d = l + k = log theta - log mu: behaviour to current. Carries the gradient."""
        return self.logp_T - self.behaviour_logp_T

    def logps(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Detached log-probs of the ratio's numerator and denominator."""
        top = self.old_logp_T if pair == "old/mu" else self.logp_T.detach()
        return top, self.old_logp_T if pair == "theta/old" else self.behaviour_logp_T

    def detached_log_ratio(self, pair: Pair) -> Tensor:
        """[T] the pair's log-ratio, detached: what masks and thresholds look at."""
        numerator_T, denominator_T = self.logps(pair)
        return numerator_T - denominator_T

    def top_k(self, anchor: Literal["theta/old", "theta/mu"]) -> TopK:
        """The candidates of the pair's denominator."""
        found = self.old_top_k if anchor == "theta/old" else self.behaviour_top_k
        assert found is not None, "the loop must provide what Stack.needs names"
        return found

    def live_log_ratio(self, pair: Literal["theta/old", "theta/mu"]) -> Tensor:
        """[T] the pair's log-ratio with its gradient."""
        return self.log_ratio_T if pair == "theta/old" else self.drift_T

    def sequence_advantage_T(self) -> Tensor:
        """[T] the mean advantage of the token's sequence, for objectives with one term a sequence."""
        return self.segments.spread(self.segments.mean(self.advantages_T))

    def share(self, condition_T: Tensor) -> Metric:
        """The metric "share of loss tokens for which condition_T holds"."""
        return as_metric((condition_T & self.mask_T).sum(), self.mask_T.sum())

    def average(self, x_T: Tensor) -> Metric:
        """The metric "mean of x over loss tokens"."""
        return as_metric(torch.where(self.mask_T, x_T.detach().double(), 0.0).sum(), self.mask_T.sum())


def ratio(log_ratio: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """exp of a log-ratio clamped to +-limit. Outside the clamp the gradient is 0."""
    return log_ratio.clamp(-limit, limit).exp()


def straight_through(value_T: Tensor, logp_T: Tensor) -> Tensor:
    """value_T in the forward pass; in the backward pass value_T times the gradient of logp_T, usually the token's own log-prob.

    The form sg[w] * pi / sg[pi] of GSPO-token (2507.18071), CTPO and PNPO: no gradient passes through the statistic, so none has to
    pass through a collective when a sequence is sharded.
    """
    return value_T.detach() * (logp_T - logp_T.detach()).exp()
