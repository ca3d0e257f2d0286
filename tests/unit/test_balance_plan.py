"""What a sequence costs, and which trajectories change their leader. The exchange itself is in tests/dist/test_balance.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.actor.balance import SLACK, Move, model_cost, plan


def transformer(**changes: object) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig  # after megatron_rl.actor, which patches it

    small = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 4, "ffn_hidden_size": 16}
    return TransformerConfig(**{**small, "gated_linear_unit": True, "add_bias_linear": False, **changes})


def test_cost_of_a_dense_model_by_hand() -> None:
    """A layer: Q and O 8 x 8, K and V 8 x 4, three 8 x 16; the head 8 x 10; 2 FLOPs a weight. Attention: 2 x 8 FLOPs a squared position."""
    weights = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16) + 8 * 10
    cost = model_cost(transformer(), 10)
    assert (cost.linear, cost.quadratic) == (2 * weights, 2 * 2 * 8)
    assert cost(3) == 3 * 2 * weights + 9 * 32


def test_experts_count_where_they_are_chosen() -> None:
    """One layer of two has 4 experts of 8 x 6, of which 2 work, and a router of 8 x 4."""
    moe = transformer(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=6, moe_layer_freq=[0, 1])
    weights = 2 * (2 * 8 * 8 + 2 * 8 * 4) + 3 * 8 * 16 + 2 * 3 * 8 * 6 + 8 * 4 + 8 * 10
    assert model_cost(moe, 10).linear == 2 * weights


def test_a_known_model() -> None:
    """Qwen3-30B-A3B activates 3.3 billion weights, its 0.31 billion of input embedding among them, which cost nothing."""
    qwen = transformer(
        num_layers=48, hidden_size=2048, num_attention_heads=32, num_query_groups=4, kv_channels=128, ffn_hidden_size=6144,
        num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, moe_layer_freq=[1] * 48,
    )  # fmt: skip
    cost = model_cost(qwen, 151_936)
    assert cost.linear / 2 + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    # Attention overtakes the rest between 15 and 16 thousand positions.
    assert 15_000 < cost.linear / cost.quadratic < 16_000


def after(costs: Sequence[Sequence[float]], moves: Sequence[Move]) -> list[list[tuple[int, int]]]:
    """(first owner, index) of what each owner has in the end."""
    owner = {(o, i): o for o, mine in enumerate(costs) for i in range(len(mine))}
    for move in moves:
        owner[move.source, move.index] = move.destination
    return [[item for item, o in owner.items() if o == k] for k in range(len(costs))]


def loads(costs: Sequence[Sequence[float]], moves: Sequence[Move]) -> list[float]:
    return [sum(costs[o][i] for o, i in mine) for mine in after(costs, moves)]


def test_one_move_by_hand() -> None:
    """12 and 2: the 4 goes over. 8 and 6 is the best that even numbers summing to 14 allow but 7 and 7."""
    assert plan([[6, 4, 2], [2]]) == [Move(0, 1, 1)]


def test_an_exchange_by_hand() -> None:
    """10 and 6: moving a 5 would only turn the tables; a 5 for a 3 makes both 8."""
    moves = plan([[5, 5], [3, 3]])
    assert sorted((m.source, m.destination) for m in moves) == [(0, 1), (1, 0)]
    assert loads([[5, 5], [3, 3]], moves) == [8, 8]


def test_what_gains_less_than_the_slack_stays() -> None:
    assert plan([[52, 51], [51, 50]]) == [], "the costliest is within 2 % of the mean"
    assert plan([[100.0], [1, 1], [1, 1]]) == [], "one trajectory cannot be cut"


def test_nothing_moves_that_does_not_lower_the_maximum() -> None:
    """Owner 0 stays the costliest with its one trajectory whatever the others do."""
    assert plan([[100.0], [30, 30], [1, 1]]) == []


def test_an_owner_without_trajectories_gets_one() -> None:
    """Even where that lowers no maximum: it would have to make up routes for a filler."""
    assert plan([[100.0], [3, 2], []]) == [Move(1, 2, 1)]
    assert plan([[100.0], []]) == [], "one cannot be shared"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.floats(1, 100), max_size=12), min_size=2, max_size=8).filter(lambda c: any(c)))
def test_plans(costs: list[list[float]]) -> None:
    moves = plan(costs)
    assert moves == plan(costs), "every rank plans the same"
    assert all(0 <= m.index < len(costs[m.source]) and m.source != m.destination for m in moves)
    assert len({(m.source, m.index) for m in moves}) == len(moves), "nothing travels twice"
    owned = after(costs, moves)
    assert all(owned[o] for o, mine in enumerate(costs) if mine), "no owner gives its last"
    spare = sum(len(mine) for mine in costs) >= len(costs)
    assert all(owned) or not spare
    before, found = loads(costs, []), loads(costs, moves)
    if all(costs):
        assert max(found) <= max(before) + 1e-9
        assert not moves or max(found) <= (1 - SLACK) * max(before) + 1e-9


def test_many_short_trajectories_even_out_to_the_slack() -> None:
    """64 owners, one with ten times the load of the others: the mean is reached within 2 %, and only the heavy one gives."""
    costs = [[1.0 + i % 3 for i in range(640 if owner == 7 else 64)] for owner in range(64)]
    moves = plan(costs)
    found = loads(costs, moves)
    assert max(found) <= (1 + SLACK) * sum(found) / 64
    assert {m.source for m in moves} == {7}
