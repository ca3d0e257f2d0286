"""Faults of routing replay that users of other trainers reported, as tests of their kind.

| reported | kind | test |
|---|---|---|
| slime#1909, #1145, miles#407 | replay is on, a reply has no routes | test_rollout_ingest.test_refused: at once, naming request and flag |
| slime#951 | replay with recomputation runs out of rows | test_routing.test_every_call_gets_the_rows_of_its_..., dist/test_replay_layouts |
| slime#941, #1052, miles#645, #2697 | padding rows: zeros, or all on one rank | test_padding_is_spread_whatever_the_shape |
| miles#2570, verl#7340, verl#7106 | routers of a discarded decoder, or by position | test_only_routers_of_the_live_model_are_bound |
| verl#4986, sglang#12162 | an expert twice | test_a_duplicate_stops_at_every_door |
| AReaL#1166 | FIFO that knows no micro-batches, interleaved | test_virtual_chunks_in_interleaved_order |
| Megatron-LM PR#79 of ISEEKYAN | no gradient to the router | test_routing.test_the_router_gets_the_gradient_of_the_masked_gate |
| sglang#24851 | all rows sent again each turn | engine/test_routes_partial: start_len, and a contiguous check |
| sglang#20964 | a row too many or too few | test_a_reply_with_another_number_of_rows_is_refused |
| sglang#26860 | capture buffer below the prefill chunk | engine/test_patches_sglang.test_teacher_forced_prompts_in_chunks |
| slime#2384 | all routes to every rank | dist/test_transport, test_a_shard_holds_its_own_bytes_alone |
| NeMo-RL#2849 | routes dropped on the way | test_routes_survive_from_trajectory_to_shard |
| slime (its check of R3) | a layer of zeros | test_a_layer_that_was_never_captured_is_refused |
| verl, dtype of wire and memory | ids that overflow their type | test_no_id_overflows_on_the_way |
| verl#7106 | padding with virtual pipeline | dist/test_replay_layouts: PP2 VPP2 on a ragged batch, every map of every rank |
| Megatron-LM#7404 | multi-token prediction's routers, capacity, fused routers, auxiliary losses | test_routing_megatron: refused by name |
| sglang (abort while sampling) | half an answer trained on, or a run lost | engine/test_routes_partial: gone on with, same rows |
"""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_rl.actor.feed import shard
from megatron_rl.data.packing import pack
from megatron_rl.rollout.routes import RouteShape, decode_routes
from megatron_rl.routing.codec import encode
from megatron_rl.routing.layout import Place, check_routes, padding_routes
from megatron_rl.routing.replay import RoutingReplay
from megatron_rl.types import Batch, PackedBatch, Prompt, Trajectory
from tests.unit.test_routing import Model, Router, data, routes


def as_sent(ids: NDArray[np.integer]) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def distinct(rows: int, layers: int, k: int, experts: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).random((rows, layers, experts)).argsort(-1)[..., :k]


def trajectory(ids: NDArray[np.integer], dtype: type = np.uint8) -> Trajectory:
    n = len(ids) + 1
    mask = np.arange(n) > 0
    logp, label = np.where(mask, -1.0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    return Trajectory(Prompt("p", np.zeros(1, np.int32), "", ""), "g", np.zeros(n, np.int32), mask, logp, label, label,
                      ids.astype(dtype), "stop", "")  # fmt: skip


def packed(*answers: Trajectory, experts: int, budget: int = 64, multiple_of: int = 1) -> PackedBatch:
    advantages = tuple(np.zeros(len(t.tokens), np.float32) for t in answers)
    (one,) = pack(Batch(answers, advantages), budget=budget, multiple_of=multiple_of, experts=experts)
    return one


@pytest.mark.parametrize(("k", "experts"), [(1, 8), (2, 8), (8, 128), (6, 64), (8, 160), (8, 8), (10, 512)])
def test_padding_is_spread_whatever_the_shape(k: int, experts: int) -> None:
    """Over E rows every expert gets k; over any number of rows, no two experts' loads differ by more than one."""
    dtype = torch.uint8 if experts <= 256 else torch.int16
    padding = padding_routes(experts, 3, k, experts, dtype)
    check_routes(padding, experts, "padding")
    for rows in (1, 5, experts):
        load = torch.bincount(padding[:rows, 1].flatten().long(), minlength=experts)
        assert int(load.max() - load.min()) <= 1
    assert (load == k).all()


def test_only_routers_of_the_live_model_are_bound() -> None:
    """A decoder that was built and thrown away, as a warm-up does, leaves no trace; layers go by their number, not by order of creation."""
    Model(layers=(2, 5))
    model = Model(layers=(5, 2))  # created in this order
    replay = RoutingReplay([model], Router)
    assert replay.layer_numbers == (2, 5)
    (x,), rows = data(1), routes(5, 2, seed=8)
    with replay.session("replay", [rows], micro_batches=1):
        replay.start_micro_batch(0, 0)
        model(x)
    for router, column in zip(model.routers, (1, 0), strict=True):
        assert torch.equal(router.chosen[-1], rows[:, column].long())


def test_virtual_chunks_in_interleaved_order() -> None:
    """Two chunks of one rank: forwards of chunk 0 run ahead, backwards come chunk 1 first, everything is computed again in them."""
    chunks = [Model(layers=(1,), recompute=True), Model(layers=(3,), recompute=True)]
    replay = RoutingReplay(chunks, Router)
    inputs = data(2)
    rows = [routes(len(x), 2, seed=20 + i) for i, x in enumerate(inputs)]
    out: dict[tuple[int, int], torch.Tensor] = {}
    with replay.session("replay", rows, micro_batches=2):
        for chunk, micro_batch in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            replay.start_micro_batch(chunk, micro_batch)
            out[chunk, micro_batch] = chunks[chunk](inputs[micro_batch])
        for chunk, micro_batch in [(1, 0), (1, 1), (0, 0), (0, 1)]:
            out[chunk, micro_batch].sum().backward()
    for chunk, model in enumerate(chunks):
        for call, chosen in enumerate(model.routers[0].chosen):  # forward 0, 1, then recompute 0, 1
            assert torch.equal(chosen, rows[call % 2][:, chunk].long())


def test_a_duplicate_stops_at_every_door() -> None:
    """Where it comes in, where it is packed, where it is stored."""
    ids = distinct(3, 2, 4, 16)
    ids[1, 1, 3] = ids[1, 1, 0]
    with pytest.raises(ValueError, match=r"token 1, layer 1: .* the same expert twice"):
        decode_routes(as_sent(ids), 3, RouteShape(2, (0, 1), 4, 16))
    with pytest.raises(ValueError, match="sent to one expert twice"):
        packed(trajectory(ids), experts=16)
    with pytest.raises(ValueError, match=r"token 1, layer 1: .* names one expert twice"):
        encode(ids, 16)


@pytest.mark.parametrize("rows", [4, 6])
def test_a_reply_with_another_number_of_rows_is_refused(rows: int) -> None:
    """5 tokens after the first: 5 rows, neither the last one missing nor one for a token that was never put in."""
    with pytest.raises(ValueError, match=f"are {rows} rows of 2 layers x 2 experts; expected 5 rows"):
        decode_routes(as_sent(distinct(rows, 2, 2, 8)), 5, RouteShape(2, (0, 1), 2, 8))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_was_never_captured_is_refused(layer: int) -> None:
    """An engine that fails to capture a layer (another pipeline stage's) leaves zeros: one expert k times."""
    ids = distinct(5, 2, 2, 8)
    ids[:, layer] = 0
    with pytest.raises(ValueError, match=rf"token 0, layer {layer}: .* the same expert twice"):
        decode_routes(as_sent(ids), 5, RouteShape(2, (0, 1), 2, 8))


def test_a_layer_of_zeros_is_refused_for_one_expert_a_token_too() -> None:
    """With k = 1 zeros are a valid choice, so the whole layer has to be looked at; expert 0 for some tokens is nothing unusual."""
    ids = distinct(40, 2, 1, 8)
    decode_routes(as_sent(ids), 40, RouteShape(2, (0, 1), 1, 8))
    ids[:, 1] = 0
    with pytest.raises(ValueError, match="layer 1: expert 0 for all 40 tokens"):
        decode_routes(as_sent(ids), 40, RouteShape(2, (0, 1), 1, 8))


def test_a_shard_holds_its_own_bytes_alone() -> None:
    """A view would take the whole batch's storage along when it is pickled."""
    whole = packed(trajectory(distinct(31, 4, 2, 8)), trajectory(distinct(17, 4, 2, 8)), experts=8, multiple_of=4)
    for tensor_rank in range(2):
        part = shard(whole, Place(tensor_rank, 2, 0, 1, (1, 2)))
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes, name


def test_routes_survive_from_trajectory_to_shard() -> None:
    """Every id of a 5-layer answer is found on exactly one of TP2 x PP2's ranks."""
    ids = distinct(32, 5, 2, 8)
    whole = packed(trajectory(ids), experts=8, multiple_of=2)
    stages = ((0, 1, 2), (3, 4))
    parts = [[shard(whole, Place(t, 2, 0, 1, layers)).routes_TLK for t in range(2)] for layers in stages]
    stitched = torch.cat([torch.cat([p for p in stage if p is not None]) for stage in parts], dim=1)
    np.testing.assert_array_equal(stitched.numpy(), ids)


@pytest.mark.parametrize("experts", [128, 129, 256, 257, 512])
def test_no_id_overflows_on_the_way(experts: int) -> None:
    """The last expert of each model: beyond int8, beyond uint8, and what a byte would make of 256 (expert 0)."""
    ids = np.stack([np.array([[experts - 1, 0]]), np.array([[1, experts - 1]])])
    found = decode_routes(as_sent(ids), 2, RouteShape(1, (0,), 2, experts))
    whole = packed(trajectory(found, found.dtype.type), experts=experts)
    assert whole.routes_TLK is not None
    assert whole.routes_TLK[:2].tolist() == ids.tolist()
    model = Model(layers=(1,))
    replay = RoutingReplay([model], Router)
    real = torch.ones(2, dtype=torch.bool)
    with replay.session("observe", [whole.routes_TLK[:2]], micro_batches=1, real_rows=[real]) as session:
        replay.start_micro_batch(0, 0)
        model(torch.zeros(2, 4))
        assert session.rows[0, 1].tolist() == ids[:, 0].tolist()
