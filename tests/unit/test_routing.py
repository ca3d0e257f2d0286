"""Which rows go where, and that a router can neither skip, repeat nor confuse them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_rl.routing.agreement import NEVER
from megatron_rl.routing.layout import (
    Place,
    check_routes,
    context_positions,
    cut,
    gathered_order,
    local_positions,
    padding_routes,
    second_chunk,
)
from megatron_rl.routing.replay import RoutingReplay

EXPERTS, K = 6, 2


class Router(nn.Module):
    """The part of Megatron's TopKRouter that a hook sees: gates are a softmax over the chosen logits."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.config = SimpleNamespace(moe_router_score_function="softmax", moe_router_pre_softmax=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 4, generator=torch.Generator().manual_seed(layer_number)))
        self.router_replay: Any = None
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.weight.T

        def live(scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> tuple[Tensor, Tensor]:
            return torch.topk(scores, topk, dim=-1)

        scores, chosen = self.router_replay.get_replay_topk(logits, K, None, None, live)
        self.chosen.append(chosen.detach())
        gates = torch.zeros_like(logits).scatter(1, chosen, scores.softmax(-1))
        return x + gates @ self.weight


class Model(nn.Module):
    def __init__(self, layers: tuple[int, ...] = (2, 5), recompute: bool = False) -> None:
        super().__init__()
        self.routers = nn.ModuleList(Router(n) for n in layers)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for router in self.routers:
            x = checkpoint(router, x, use_reentrant=True) if self.recompute else router(x)
        return x


def routes(tokens: int, layers: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, EXPERTS, generator=g).argsort(-1)[..., :K].to(torch.uint8)


def data(micro_batches: int) -> list[Tensor]:
    return [torch.randn(5 + i, 4, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(micro_batches)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["one by one", "two in flight", "all in flight"])
def test_every_call_gets_the_rows_of_its_micro_batch_and_layer(recompute: bool, order: str) -> None:
    """Forwards may run ahead of backwards, as in 1F1B; recomputes then come in the order of the forwards."""
    model, inputs = Model(recompute=recompute), data(4)
    replay = RoutingReplay([model], Router)
    rows = [routes(len(x), 2, seed=10 + i) for i, x in enumerate(inputs)]
    ahead = {"one by one": 1, "two in flight": 2, "all in flight": 4}[order]
    seen: list[tuple[int, int]] = []
    with replay.session("replay", rows, micro_batches=4):
        waiting: list[tuple[int, Tensor]] = []
        for i, x in enumerate(inputs):
            replay.start_micro_batch(0, i)
            waiting.append((i, model(x)))
            seen.append((i, 1))
            if len(waiting) == ahead:
                j, out = waiting.pop(0)
                out.sum().backward()
                seen.append((j, 2))
        for j, out in waiting:
            out.sum().backward()
            seen.append((j, 2))
    for column, router in enumerate(model.routers):
        calls = [i for i, kind in seen if kind == 1 or recompute]
        assert len(router.chosen) == len(calls)
        for call, chosen in zip(calls, router.chosen, strict=True):
            assert torch.equal(chosen, rows[call][:, column].long())


def record(model: Model, replay: RoutingReplay, x: Tensor) -> tuple[Tensor, Tensor]:
    """The model's output with free routing, and the routes it took."""
    with replay.session("record", micro_batches=1) as session:
        replay.start_micro_batch(0, 0)
        out = model(x)
    return out, torch.stack([session.recorded[0, n] for n in replay.layer_numbers], dim=1)


def test_replay_of_own_routes_is_the_identity_and_of_others_is_not() -> None:
    model, (x,) = Model(), data(1)
    replay = RoutingReplay([model], Router)
    free, own = record(model, replay, x)
    results = []
    for rows in (own, routes(len(x), 2, seed=3)):
        with replay.session("replay", [rows], micro_batches=1):
            replay.start_micro_batch(0, 0)
            results.append(model(x))
    assert torch.equal(results[0], free)
    assert not torch.allclose(results[1], free)


def test_the_router_gets_the_gradient_of_the_masked_gate() -> None:
    model, (x,) = Model(layers=(1,)), data(1)
    router, rows = model.routers[0], routes(5, 1, seed=4)
    replay = RoutingReplay([model], Router)
    with replay.session("replay", [rows], micro_batches=1):
        replay.start_micro_batch(0, 0)
        (found,) = torch.autograd.grad(model(x).square().sum(), router.weight)
    mask = torch.zeros(5, EXPERTS, dtype=torch.bool).scatter(1, rows[:, 0].long(), True)
    logits = x @ router.weight.T
    gates = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    (wanted,) = torch.autograd.grad((x + gates @ router.weight).square().sum(), router.weight)
    torch.testing.assert_close(found, wanted)
    assert found.abs().sum() > 0


def test_observe_counts_layers_that_choose_another_set() -> None:
    model, (x,) = Model(), data(1)
    replay = RoutingReplay([model], Router)
    free, own = record(model, replay, x)
    given = own.flip(-1).clone()  # the same sets in another order: nothing differs
    given[1, 0] = torch.tensor([e for e in range(EXPERTS) if e not in own[1, 0].tolist()][:K])
    given[3] = torch.tensor([[e for e in range(EXPERTS) if e not in own[3, c].tolist()][:K] for c in range(2)])
    real = torch.tensor([True, True, True, True, False])
    given[4] = given[3]  # in padding, so it counts nowhere
    with replay.session("observe", [given], micro_batches=1, real_rows=[real]) as session:
        replay.start_micro_batch(0, 0)
        assert torch.equal(model(x), free)
    first, second = replay.layer_numbers
    assert session.differing[0].tolist() == [0, 1, 0, 2, 0]
    assert session.first[0].tolist() == [NEVER, first, NEVER, first, NEVER]
    assert (session.agreement[first].tokens, session.agreement[first].exact, session.agreement[second].exact) == (4, 2, 3)


def test_replay_may_ask_what_routers_would_choose_behind_replayed_layers() -> None:
    """The first layer sees the same tokens either way; the second sees those of a first one that took the given experts."""
    model, (x,) = Model(), data(1)
    replay, rows, real = RoutingReplay([model], Router), routes(5, 2, seed=6), torch.tensor([True, True, True, True, False])
    results: dict[str, Tensor] = {}
    with replay.session("replay", [rows], micro_batches=1):
        replay.start_micro_batch(0, 0)
        plain = model(x)
    seen = {}
    for mode in ("replay", "observe"):
        with replay.session(mode, [rows], micro_batches=1, real_rows=[real]) as session:  # type: ignore[arg-type]
            replay.start_micro_batch(0, 0)
            results[mode] = model(x)
        seen[mode] = session.agreement
    assert torch.equal(results["replay"], plain) and not torch.allclose(results["observe"], plain)
    first, second = replay.layer_numbers
    assert torch.equal(seen["replay"][first].live_load_E, seen["observe"][first].live_load_E)
    behind = model.routers[0](x)  # no session: the first layer's own choice, which is not what it took
    assert not torch.allclose(behind, plain)
    with replay.session("replay", [rows], micro_batches=1):
        replay.start_micro_batch(0, 0)
        entered = model.routers[0](x)
        own = (entered @ model.routers[1].weight.T).topk(K, dim=-1).indices
        model.routers[1](entered)
    wanted = torch.bincount(own[real].flatten(), minlength=EXPERTS).double()
    assert torch.equal(seen["replay"][second].live_load_E, wanted)


def run(model: Model, replay: RoutingReplay, rows: list[Tensor | None], inputs: list[Tensor], order: list[int]) -> None:
    """A session over two micro-batches in which those of `order` are forwarded."""
    with replay.session("replay", rows, micro_batches=2):
        for i in order:
            replay.start_micro_batch(0, i)
            model(inputs[i])


def test_what_is_missing_or_left_over_is_an_error_that_says_where() -> None:
    model, inputs = Model(), data(2)
    replay = RoutingReplay([model], Router)
    rows: list[Tensor | None] = [routes(len(x), 2, seed=i) for i, x in enumerate(inputs)]
    with pytest.raises(RuntimeError, match=r"layer 2 never routed micro-batches \[1\] of 2"):
        run(model, replay, rows, inputs, [0])
    with pytest.raises(RuntimeError, match="layer 2 routes micro-batch 0 a second time"):
        run(model, replay, rows, inputs, [0, 0])
    with pytest.raises(RuntimeError, match=r"micro-batch 0, layer 2: routes \(6, 2\) for 5 tokens"):
        run(model, replay, rows[::-1], inputs, [0])
    with pytest.raises(ValueError, match="needs routes for each of 2 micro-batches"):
        run(model, replay, [None, None], inputs, [])
    with pytest.raises(RuntimeError, match="routes for 1 layers, this rank has 2"):
        run(model, replay, [r[:, :1] for r in rows if r is not None], inputs, [])
    run(model, replay, rows, inputs, [0, 1])  # after all these failures the routers are free again


def test_two_models_in_one_process_do_not_share_routes() -> None:
    policy, reference, (x,) = Model(), Model(), data(1)
    replay, _ = RoutingReplay([policy], Router), RoutingReplay([reference], Router)
    free = reference(x)  # outside of any session: live
    with replay.session("replay", [routes(5, 2, seed=9)], micro_batches=1):
        replay.start_micro_batch(0, 0)
        forced = policy(x)
        assert torch.equal(reference(x), free)
    assert not torch.allclose(forced, free)


def test_two_routers_of_one_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="two live routers claim layer 3"):
        RoutingReplay([Model(layers=(3, 3))], Router)


@settings(deadline=None)  # a busy machine is no fault
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    context=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
)
def test_the_ranks_shards_tile_the_pack(lengths: list[int], context: int, tensor: int) -> None:
    spans = [n * 2 * context * tensor for n in lengths]  # divisible, as packing pads them
    boundaries = torch.tensor([0, *spans]).cumsum(0).int()
    length = sum(spans)
    positions = [
        local_positions(boundaries, length, Place(t, tensor, c, context, ())).tolist() for c in range(context) for t in range(tensor)
    ]
    assert sorted(p for part in positions for p in part) == list(range(length))
    assert len({len(p) for p in positions}) == 1


def test_zig_zag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    boundaries = torch.tensor([0, 8, 16], dtype=torch.int32)
    place = Place(0, 1, 0, 2, (0,))
    assert local_positions(boundaries, 16, place).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]


def test_a_shards_second_chunks_and_the_way_back() -> None:
    """Sequences of 8 and 4 over two ranks: chunks of 2 and 1; rank 1 holds the two inner chunks."""
    boundaries = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert context_positions(boundaries, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    assert second_chunk(boundaries, 2).tolist() == [False, False, True, True, False, True]
    shards = torch.cat([context_positions(boundaries, rank, 2) for rank in range(2)])
    assert shards[gathered_order(boundaries, 2)].tolist() == list(range(12))


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"sequences of \[8, 6\] positions cannot be cut into 4 chunks"):
        context_positions(torch.tensor([0, 8, 14]), 0, 2)


def test_cut_takes_own_rows_and_own_layers() -> None:
    whole = torch.arange(8 * 3 * 2).view(8, 3, 2)
    part = cut(whole, torch.tensor([0, 8], dtype=torch.int32), Place(1, 2, 0, 1, (0, 2)))
    assert torch.equal(part, whole[4:][:, [0, 2]])


def test_padding_is_spread_evenly_over_distinct_experts() -> None:
    padding = padding_routes(rows=12, layers=3, k=2, experts=6)
    check_routes(padding, 6, "padding")
    assert torch.bincount(padding[:, 0].flatten().long(), minlength=6).tolist() == [4] * 6  # 12 x 2 / 6


def test_malformed_routes_are_refused() -> None:
    with pytest.raises(ValueError, match="expert ids run from 0 to 6, but the model has experts 0 to 5"):
        check_routes(torch.tensor([[[0, 6]]]), 6, "sample 1")
    with pytest.raises(ValueError, match="sample 1: a token is sent to one expert twice"):
        check_routes(torch.tensor([[[3, 3]]]), 6, "sample 1")
