"""The weight that a method puts on A * grad log theta, read off the method itself by autograd.

Each point of a curve is a sequence of its own: its tokens are shifted by one log-ratio, the stack the registry builds is evaluated on all
of them at once, and the derivative with respect to one token's log-prob is the answer. Nothing is written down a second time.

Legend: N points, L tokens of each point's sequence, T = N * L positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.methods.catalog import METHODS
from megatron_rl.methods.objective import Denominators, Tokens, TopK
from megatron_rl.methods.registry import build
from megatron_rl.methods.segments import LocalSegments
from megatron_rl.methods.stack import Stack

Pair = Literal["theta/old", "theta/mu", "old/mu", "theta/reference"]
UNWEIGHTED = ObjectiveConfig("policy_gradient", {"weight": "none"}, "token-mean")
"""What corrections are stacked on: its own weight is 1."""
POINTS = 401
ENVELOPE = 0.4
"""Log-ratio theta/old of the top-K candidate that is not the label, for SIS."""


@dataclass(frozen=True)
class Probe:
    """One curve: how the method is configured and what surrounds the token whose weight is read."""

    label: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    moves: Literal["token", "sequence"] = "token"
    """Whether the probed token alone is shifted, or its whole sequence."""
    length: int = 1
    """L, loss tokens of the sequence."""
    position: int = 1
    """Which of them is probed, from 1."""
    prob: float = 1e-3
    """Probability of every token under the policy that stays put. Points where the other would exceed 1 are left out."""
    stays: Literal["denominator", "numerator"] = "denominator"
    gap: float = 0.0
    """log old/mu of every token, where the axis is theta/old."""
    router_shift: float = 0.0
    uniform: float = 0.5
    spread: float = 0.3
    """Standard deviation of the log-ratios of the mini-batch that statistics are taken over."""


def stack_of(name: str, params: Mapping[str, Any]) -> Stack:
    """The method as an objective, or on top of the unweighted policy gradient."""
    if METHODS[name].kind == "objective":
        return build(ObjectiveConfig(name, dict(params), "token-mean"), [])
    return build(UNWEIGHTED, [MethodConfig(name, dict(params))])


def slope(name: str, pair: Pair, x_N: NDArray[np.float64], probe: Probe, advantage: float) -> NDArray[np.float64]:
    """[N] -dL/dlog theta of the probed token at each log-ratio; NaN where a probability would exceed 1."""
    stack = stack_of(name, probe.params)
    totals = _totals(stack, pair, probe, advantage)
    shift_NL = torch.zeros(len(x_N), probe.length, dtype=torch.float64)
    moved = slice(None) if probe.moves == "sequence" else slice(probe.position - 1, probe.position)
    shift_NL[:, moved] = torch.from_numpy(x_N)[:, None]
    tokens, leaf_T = _tokens(pair, shift_NL, probe, advantage, totals)
    loss = stack.evaluate(tokens, Denominators(tokens=1.0, sequences=1.0, max_tokens=1.0)).loss
    (gradient_T,) = torch.autograd.grad(loss, leaf_T)
    slope_N = -gradient_T.view(shift_NL.shape)[:, probe.position - 1].numpy()
    top_N = np.log(probe.prob) + (x_N if probe.stays == "denominator" else -x_N)
    return np.where(top_N <= 0, slope_N, np.nan)


def _totals(stack: Stack, pair: Pair, probe: Probe, advantage: float) -> dict[str, Tensor]:
    """Statistics of a mini-batch of 4096 sequences whose log-ratios are normal; the curve's own points do not enter."""
    if not stack.has_statistics:
        return {}
    generator = torch.Generator().manual_seed(0)
    shift_NL = probe.spread * torch.randn(4096, probe.length, generator=generator, dtype=torch.float64)
    return stack.statistics(_tokens(pair, shift_NL, probe, advantage, {})[0])


def _tokens(pair: Pair, shift_NL: Tensor, probe: Probe, advantage: float, totals: dict[str, Tensor]) -> tuple[Tokens, Tensor]:
    """The tokens, and the leaf that theta's log-probs are."""
    shift_T = shift_NL.flatten()
    still_T = torch.full_like(shift_T, np.log(probe.prob))
    top_T, bottom_T = (still_T + shift_T, still_T) if probe.stays == "denominator" else (still_T, still_T - shift_T)
    leaf_T = top_T.clone().requires_grad_()
    old_T, mu_T = (top_T, bottom_T) if pair == "old/mu" else (bottom_T, bottom_T - probe.gap)
    return Tokens.of(
        leaf_T, old_T, mu_T, torch.full_like(shift_T, advantage), _segments(shift_NL), totals,
        behaviour_top_k=_candidates(top_T, mu_T), old_top_k=_candidates(top_T, old_T),
        uniform_T=torch.full_like(shift_T, probe.uniform),
        router_shift_T=torch.full_like(shift_T, probe.router_shift), reference_logp_T=bottom_T,
    ), leaf_T  # fmt: skip


def _segments(shift_NL: Tensor) -> LocalSegments:
    points, length = shift_NL.shape
    sequence_T = torch.arange(points).repeat_interleave(length)
    return LocalSegments(sequence_T, torch.ones(points * length, dtype=torch.bool), points, torch.zeros_like(sequence_T))


def _candidates(logp_T: Tensor, base_logp_T: Tensor) -> TopK:
    """The label and one other token, which became likelier by ENVELOPE."""
    other_T = torch.full_like(logp_T, np.log(1e-3))
    base_TK = torch.stack([base_logp_T, other_T], dim=1)
    return TopK(torch.stack([logp_T, other_T + ENVELOPE], dim=1), base_TK, torch.ones_like(logp_T, dtype=torch.bool))
