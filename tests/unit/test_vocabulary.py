"""Ranking tokens over a vocabulary with padding, and what a support may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.actor import vocabulary
from megatron_rl.actor.logprobs import Support, VocabShard, best_tokens, vocabulary_stats

H, V, PADDED = 8, 29, 32
ONE = VocabShard(start=0, true_size=V, group=None)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from([-2.0, -0.0, 0.0, 1.0, 3.5]), min_size=V, max_size=V), k=st.integers(1, V + 3), tile=st.integers(1, 99)
)
def test_top_k_breaks_ties_by_the_smaller_id(values: list[float], k: int, tile: int) -> None:
    """Values from a set of five tie nearly always; -0.0 and 0.0 are equal. A stable sort is the definition."""
    hidden = torch.ones(2, 1)
    weight = torch.cat([torch.tensor(values), torch.full((PADDED - V,), 9.0)])[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocabulary.TILE_ELEMENTS, "cpu", tile)
        stats = vocabulary_stats(hidden, weight, torch.zeros(2, dtype=torch.long), ONE, top_k=k)
    order = (weight[:V, 0] + 0.0).sort(descending=True, stable=True)
    wanted = torch.cat([order.indices, torch.full((3,), -1)])[:k]
    assert stats.top_ids_TK is not None and stats.top_logp_TK is not None
    assert torch.equal(stats.top_ids_TK, wanted.repeat(2, 1))
    log_p = torch.cat([order.values.log_softmax(0), torch.full((3,), -torch.inf)])[:k]
    torch.testing.assert_close(stats.top_logp_TK, log_p.repeat(2, 1))


def test_the_likeliest_token_is_the_smallest_id_among_equals() -> None:
    hidden = torch.eye(2, H)
    weight = torch.zeros(PADDED, H)
    weight[[3, 7], 0] = 5.0  # a tie for the first position
    weight[11, 1] = 2.0
    weight[V:, :] = 9.0  # padding never wins
    assert best_tokens(hidden, weight, ONE).tolist() == [3, 11]


@pytest.mark.parametrize(("bad", "named"), [({}, "exactly one"), ({"min_p": 0.1, "keep_TK": torch.zeros(1, 1)}, "exactly one"),
                                            ({"min_p": 0.0}, "min_p is 0.0"), ({"min_p": 1.5}, "min_p is 1.5")])  # fmt: skip
def test_bad_supports_are_named(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Support(**bad)
