"""The algebra over packed sequences against the plainest loop one can write."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megatron_rl.methods.segments import LocalSegments


@dataclass(frozen=True)
class Pack:
    """Sequences of (value, is loss token, turn), and how much padding follows."""

    sequences: list[list[tuple[float, bool, int]]]
    padding: int

    @property
    def rows(self) -> list[tuple[int, float, bool, int]]:
        """(sequence, value, mask, turn) of each position; NaN wherever the mask is False."""
        rows = [(i, x if m else math.nan, m, turn) for i, s in enumerate(self.sequences) for x, m, turn in s]
        return rows + [(len(self.sequences), math.nan, False, -1)] * self.padding

    def segments(self, turns: bool = True) -> LocalSegments:
        sequence_T = torch.tensor([r[0] for r in self.rows], dtype=torch.int64)
        mask_T = torch.tensor([r[2] for r in self.rows], dtype=torch.bool)
        turn_T = torch.tensor([r[3] for r in self.rows], dtype=torch.int64)
        return LocalSegments(sequence_T, mask_T, len(self.sequences), turn_T if turns else None)

    def values(self) -> torch.Tensor:
        return torch.tensor([r[1] for r in self.rows], dtype=torch.float64)

    def per_sequence(self, f: Callable[[list[float]], float]) -> list[float]:
        """f of each sequence's loss values."""
        return [f([x for x, m, _ in s if m]) for s in self.sequences]

    def per_token(self, f: Callable[[list[float], int, list[int]], float]) -> list[float]:
        """f of (loss values, index among them, turns) at each loss token; 0 elsewhere."""
        out = []
        for s in self.sequences:
            kept = [(x, turn) for x, m, turn in s if m]
            rank = 0
            for _, m, _ in s:
                out.append(f([x for x, _ in kept], rank, [turn for _, turn in kept]) if m else 0.0)
                rank += m
        return out + [0.0] * self.padding


token = st.tuples(st.floats(-3, 3), st.booleans(), st.integers(0, 2))
packs = st.builds(Pack, st.lists(st.lists(token, max_size=8), min_size=1, max_size=5), st.integers(0, 3))


def check(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(packs)
def test_reductions(pack: Pack) -> None:
    segments, x_T = pack.segments(), pack.values()
    check(segments.count(), pack.per_sequence(len))
    check(segments.sum(x_T), pack.per_sequence(sum))
    check(segments.mean(x_T), pack.per_sequence(lambda v: sum(v) / len(v) if v else 0.0))
    check(segments.max(x_T), pack.per_sequence(lambda v: max(v, default=-math.inf)))
    check(segments.min(x_T), pack.per_sequence(lambda v: min(v, default=math.inf)))
    index = {id(s): float(i + 1) for i, s in enumerate(pack.sequences)}
    expected = [index[id(s)] if m else 0.0 for s in pack.sequences for _, m, _ in s] + [0.0] * pack.padding
    check(segments.spread(torch.arange(1.0, len(pack.sequences) + 1)), expected)


@settings(max_examples=60, deadline=None)
@given(packs, st.integers(0, 9), st.booleans())
def test_scans(pack: Pack, n: int, gradient: bool) -> None:
    """Both ways: with a gradient, and the faster one that needs none on a CPU."""
    segments, x_T = pack.segments(), pack.values().requires_grad_(gradient)
    check(segments.prefix_sum(x_T), pack.per_token(lambda v, i, _: sum(v[: i + 1])))
    check(segments.prefix_count(), pack.per_token(lambda v, i, _: i + 1))
    check(segments.prefix_min_before(x_T), pack.per_token(lambda v, i, _: min(v[:i], default=math.inf)))
    check(segments.window_sum_after(x_T, n), pack.per_token(lambda v, i, _: sum(v[i + 1 : i + 1 + n])))


def test_a_nan_in_a_loss_token_shows() -> None:
    """Selection drops what stands in padding, nothing else: a NaN that is a token's own value stays in every later prefix."""
    mask_T = torch.tensor([True, False, True, True, True])
    segments = LocalSegments(torch.tensor([0, 0, 0, 0, 1]), mask_T, 2)
    x_T = torch.tensor([1.0, math.nan, math.nan, 2.0, 3.0])
    assert [*map(math.isnan, segments.prefix_sum(x_T).tolist())] == [False, False, True, True, False]
    assert [*map(math.isnan, segments.prefix_min_before(x_T).tolist())] == [False, False, False, True, False]


@settings(max_examples=60, deadline=None)
@given(packs)
def test_turns(pack: Pack) -> None:
    def mean_of_turn(values: list[float], i: int, turns: list[int]) -> float:
        same = [v for v, turn in zip(values, turns, strict=True) if turn == turns[i]]
        return sum(same) / len(same)

    def sum_of_turn(values: list[float], i: int, turns: list[int]) -> float:
        return sum(v for v, turn in zip(values, turns, strict=True) if turn == turns[i])

    check(pack.segments().turn_mean(pack.values()), pack.per_token(mean_of_turn))
    check(pack.segments().turn_sum(pack.values()), pack.per_token(sum_of_turn))
    whole = pack.per_token(lambda v, i, _: sum(v) / len(v))
    check(pack.segments(turns=False).turn_mean(pack.values()), whole)
    check(pack.segments(turns=False).turn_sum(pack.values()), pack.per_token(lambda v, i, _: sum(v)))


def test_turn_sums_are_differentiable() -> None:
    """Turns {0, 2} and {3} of one sequence, a tool token between: d/dx of sum_t w_t turn_sum(x)_t is the turn's sum of w."""
    segments = LocalSegments(torch.zeros(4, dtype=torch.int64), torch.tensor([True, False, True, True]), 1, torch.tensor([0, -1, 0, 1]))
    x_T = torch.tensor([1.0, math.nan, 2.0, 5.0], requires_grad=True)
    total_T = segments.turn_sum(x_T)
    assert total_T.tolist() == [3, 0, 3, 5]
    (torch.tensor([1.0, 9.0, 10.0, 100.0]) * total_T).sum().backward()
    assert x_T.grad is not None
    assert x_T.grad.tolist() == [11, 0, 11, 100]


def test_a_prefix_never_crosses_a_boundary() -> None:
    """A value of 1e6 in the first sequence must not leave even its rounding in the second, in fp32."""
    sequence_T = torch.tensor([0] * 1000 + [1] * 3)
    segments = LocalSegments(sequence_T, torch.ones(1003, dtype=torch.bool), 2)
    x_T = torch.cat([torch.full((1000,), 1e6 / 3), torch.tensor([0.1, 0.2, 0.3])])
    torch.testing.assert_close(segments.prefix_sum(x_T)[1000:], torch.tensor([0.1, 0.3, 0.6]), rtol=1e-6, atol=0)
    torch.testing.assert_close(segments.window_sum_after(x_T, 2)[999:], torch.tensor([0.0, 0.5, 0.3, 0.0]), rtol=1e-6, atol=0)
    assert segments.prefix_min_before(x_T)[1000] == math.inf


def test_gradients_reach_loss_tokens_only() -> None:
    segments = LocalSegments(torch.tensor([0, 0, 0, 1]), torch.tensor([True, False, True, False]), 1)
    x_T = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    segments.sum(x_T).sum().backward()
    assert x_T.grad is not None
    assert x_T.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_half_precision_is_raised() -> None:
    """256 + 1 is 256 in bf16; sums are fp32."""
    segments = LocalSegments(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), 1)
    assert segments.sum(torch.tensor([256.0, 1.0], dtype=torch.bfloat16)).item() == 257


def test_mask_must_be_boolean() -> None:
    with pytest.raises(AssertionError):
        LocalSegments(torch.zeros(2, dtype=torch.int64), torch.ones(2), 1)
