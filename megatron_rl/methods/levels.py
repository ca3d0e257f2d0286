"""Whose ratio a correction looks at: the token's, its turn's, or its sequence's."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .tokens import Pair, Tokens, ratio

Level = Literal["token", "turn", "sequence", "geometric"]
"""token: the token's own. turn: geometric mean over its turn. sequence: product over the sequence. geometric: the product's T-th root."""


def level_log_ratio(tokens: Tokens, pair: Pair, level: Level) -> Tensor:
    """[T] the detached log-ratio at that level, at each loss token."""
    log_T = tokens.detached_log_ratio(pair)
    segments = tokens.segments
    if level == "token":
        return log_T
    if level == "turn":
        return segments.turn_mean(log_T)
    return segments.spread(segments.sum(log_T) if level == "sequence" else segments.mean(log_T))


def level_ratio(tokens: Tokens, pair: Pair, level: Level) -> Tensor:
    """[T] exp of it, clamped to e^+-20."""
    return ratio(level_log_ratio(tokens, pair, level))
