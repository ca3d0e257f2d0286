"""Routes of answers that came in parts: which rows belong together, which may be replayed, and what the trainer does with the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_rl.data.packing import pack
from megatron_rl.rollout.partial import continued, request_for, rows_known
from megatron_rl.rollout.routes import RouteRows, stitch, valid_rows
from megatron_rl.routing.layout import LIVE, Place, cut
from megatron_rl.routing.replay import RoutingReplay
from megatron_rl.types import Batch, Candidates, Prompt, Trajectory
from tests.unit.test_routing import EXPERTS, K, Model, Router, record, routes

PROMPT = Prompt("p", np.array([1, 2, 3], np.int32), "", "")


def part(start: int, rows: int, valid: list[bool] | None = None) -> RouteRows:
    """Rows numbered by their token: token n goes to experts n and n + 1."""
    ids = (np.arange(start, start + rows)[:, None, None] + np.arange(2)).repeat(3, axis=1).astype(np.uint8)
    return RouteRows(start, ids, np.array(valid or [True] * rows, dtype=bool))


def answer(prompt: Prompt, sampled: list[int], version: int, reason: str = "abort", wide: int = 0) -> Trajectory:
    """As `ingest.answer` gives it: without routes."""
    n, head = len(prompt.tokens) + len(sampled), len(prompt.tokens)
    mask = np.arange(n) >= head
    ids = np.where(mask[:, None], np.arange(wide), -1).astype(np.int32)
    return Trajectory(
        prompt=prompt,
        group="g",
        tokens=np.concatenate([prompt.tokens, np.array(sampled, np.int32)]),
        loss_mask=mask,
        behaviour_logp=np.where(mask, -0.1 * version, np.nan).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=np.where(mask, 0, -1).astype(np.int32),
        routes=None,
        finish_reason=reason,  # type: ignore[arg-type]
        text="".join(map(chr, (97 + t % 26 for t in sampled))),
        candidates=Candidates(ids, np.where(ids >= 0, -1.0, -np.inf).astype(np.float32)) if wide else None,
    )


def routed(plain: Trajectory, rows: RouteRows) -> Trajectory:
    return replace(plain, routes=rows.routes, routes_valid=None if rows.valid.all() else rows.valid)


def test_parts_that_follow_each_other_are_joined() -> None:
    whole = stitch([part(0, 4), part(4, 0), part(4, 3, [False, True, True])])
    np.testing.assert_array_equal(whole.routes, part(0, 7).routes)
    assert whole.valid.tolist() == [True] * 4 + [False, True, True]


def test_parts_that_do_not_are_refused() -> None:
    with pytest.raises(ValueError, match="request 1: its routes begin at token 5, those before it end at 4: a gap"):
        stitch([part(0, 4), part(5, 2)])
    with pytest.raises(ValueError, match="request 2: its routes begin at token 5, those before it end at 6: an overlap"):
        stitch([part(0, 4), part(4, 2), part(5, 2)])
    other = part(4, 2)
    with pytest.raises(ValueError, match=r"request 1: routes of .* \(2, 2\) uint8, those before it of \(3, 2\) uint8"):
        stitch([part(0, 4), RouteRows(4, other.routes[:, :2], other.valid)])
    with pytest.raises(ValueError, match="uint16"):
        stitch([part(0, 4), RouteRows(4, other.routes.astype(np.uint16), other.valid)])


def versions(*of_tokens: int) -> NDArray[np.int32]:
    return np.array(of_tokens, np.int32)


def test_which_rows_are_of_their_tokens_version() -> None:
    """Two prompt tokens, then tokens of versions 3, 3, 4; row n belongs to token n + 1, the prompt's first row to the first sampled one."""
    tokens = versions(-1, -1, 3, 3, 4)
    assert valid_rows(tokens, 0, 0).tolist() == [True] * 4  # updated in place: every row is what its token was sampled with
    assert valid_rows(tokens, 0, 1).tolist() == [False, False, False, True]  # rows 0 to 3 were computed again by version 4
    assert valid_rows(tokens, 3, 2).tolist() == [True]
    assert valid_rows(versions(-1, -1, 3, 3), 0, 5).tolist() == [True] * 3  # retracted for want of memory, under the same weights
    assert valid_rows(versions(-1, -1, -1), 0, 1).tolist() == [True] * 2  # nothing was sampled
    # Tool output (the second -1s) is read by the pass that samples what follows it.
    assert valid_rows(versions(-1, 3, -1, -1, 4), 0, 1).tolist() == [False, True, True, True]


def test_an_answer_that_was_cut_off_goes_on() -> None:
    """3 + 2 tokens of version 5, then 2 of version 6: one turn, and rows 0 to 3 from the first request, 4 and 5 from the second."""
    before = routed(answer(PROMPT, [10, 11], 5, wide=2), part(0, 4))
    asked = request_for(before)
    assert asked.tokens.tolist() == [1, 2, 3, 10, 11] and rows_known(before) == 4
    whole = continued(before, answer(asked, [12, 13], 6, "stop", wide=3), part(4, 2))
    assert whole.tokens.tolist() == [1, 2, 3, 10, 11, 12, 13]
    assert whole.prompt is PROMPT
    assert whole.versions.tolist() == [-1, -1, -1, 5, 5, 6, 6]
    assert whole.turns.tolist() == [-1, -1, -1, 0, 0, 0, 0]
    assert whole.loss_mask.tolist() == [False] * 3 + [True] * 4
    np.testing.assert_allclose(whole.behaviour_logp[3:], [-0.5, -0.5, -0.6, -0.6])
    assert whole.text == before.text + "mn"  # 12 and 13
    assert whole.finish_reason == "stop"
    assert whole.routes_valid is None
    np.testing.assert_array_equal(whole.routes, part(0, 6).routes)  # type: ignore[arg-type]
    assert whole.candidates is not None
    assert whole.candidates.ids.tolist() == [[-1, -1, -1]] * 3 + [[0, 1, -1]] * 2 + [[0, 1, 2]] * 2


def test_a_second_turn_after_the_output_of_a_tool() -> None:
    """Tokens 20 and 21 were given: no loss, no turn; a marked row of the first request stays marked."""
    before = routed(answer(PROMPT, [10], 5, "stop"), part(0, 3, [False, True, True]))
    asked = request_for(before, np.array([20, 21]))
    assert asked.tokens.tolist() == [1, 2, 3, 10, 20, 21]
    whole = continued(before, answer(asked, [11], 5, "stop"), part(3, 3))
    assert whole.turns.tolist() == [-1, -1, -1, 0, -1, -1, 1]
    assert whole.versions.tolist() == [-1, -1, -1, 5, -1, -1, 5]
    assert whole.routes_valid is not None and whole.routes_valid.tolist() == [False] + [True] * 5
    np.testing.assert_array_equal(whole.routes, part(0, 6).routes)  # type: ignore[arg-type]


def test_an_answer_cut_off_before_its_first_token() -> None:
    before = routed(answer(PROMPT, [], 5), part(0, 2))
    whole = continued(before, answer(request_for(before), [10, 11], 5, "stop"), part(2, 2))
    assert whole.turns.tolist() == [-1, -1, -1, 0, 0]


def test_an_answer_that_never_began() -> None:
    """Aborted in the queue: no routes are known, so all are asked for."""
    before = answer(PROMPT, [], 5)
    assert rows_known(before) == 0
    whole = continued(before, answer(request_for(before), [10, 11], 5, "stop", wide=2), part(0, 4))
    np.testing.assert_array_equal(whole.routes, part(0, 4).routes)  # type: ignore[arg-type]
    assert whole.prompt is PROMPT and whole.candidates is not None


def test_a_continuation_that_never_began_leaves_the_answer_as_it_was() -> None:
    """Cut off, asked to go on, and aborted again while that still waited in the queue: there is nothing to join."""
    before = routed(answer(PROMPT, [10], 5), part(0, 3))
    again = continued(before, answer(request_for(before), [], 5), None)
    assert again.finish_reason == "abort" and again.prompt is PROMPT
    assert again.tokens.tolist() == before.tokens.tolist() and again.routes is before.routes
    assert rows_known(again) == 3


def test_parts_that_say_different_things_are_refused() -> None:
    before = routed(answer(PROMPT, [10], 5), part(0, 3))
    asked = request_for(before)
    with pytest.raises(ValueError, match="one part of an answer has routes, the other has none"):
        continued(before, answer(asked, [11], 5), None)
    with pytest.raises(ValueError, match="one part of an answer has candidates, the other has none"):
        continued(before, answer(asked, [11], 5, wide=2), part(3, 1))


def test_marked_rows_are_packed_as_live() -> None:
    """In a byte there is no room for a mark, so such a micro-batch's routes are int16; the others stay as they are."""
    marked = routed(answer(PROMPT, [10, 11], 5, "stop"), part(0, 4, [False, True, False, True]))
    plain = routed(answer(PROMPT, [10, 11], 5, "stop"), part(0, 4))
    advantages = (np.zeros(5, np.float32),)
    (packed,) = pack(Batch((marked,), advantages), budget=8, experts=8)
    assert packed.routes_TLK is not None and packed.routes_TLK.dtype == torch.int16
    assert (packed.routes_TLK == LIVE).all(-1).all(-1).tolist() == [True, False, True, False]
    np.testing.assert_array_equal(packed.routes_TLK[[1, 3]].numpy(), part(0, 4).routes[[1, 3]])
    assert cut(packed.routes_TLK, packed.cu_seqlens, Place(1, 2, 0, 1, (2,)))[:, 0, 0].tolist() == [LIVE, 3]
    (packed,) = pack(Batch((plain,), advantages), budget=8, experts=8)
    assert packed.routes_TLK is not None and packed.routes_TLK.dtype == torch.uint8


def marked_rows(live_row: int) -> torch.Tensor:
    rows = routes(5, 2, seed=7).to(torch.int16)
    rows[live_row] = LIVE
    return rows


@pytest.mark.parametrize("recompute", [False, True])
def test_a_marked_row_is_routed_live_and_the_others_are_replayed(recompute: bool) -> None:
    """Of 5 tokens, token 2 falls back; each token passes the layers alone, so its output is that of live routing, bit for bit."""
    model = Model(recompute=recompute)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    replay = RoutingReplay([model], Router)
    free, own = record(model, replay, x)
    for router in model.routers:
        router.chosen.clear()
    rows = marked_rows(2)
    with replay.session("replay", [rows], micro_batches=1):
        replay.start_micro_batch(0, 0)
        out = model(x)
        out.sum().backward()
    assert torch.equal(out[2], free[2])
    for column, router in enumerate(model.routers):
        assert len(router.chosen) == (2 if recompute else 1)
        for chosen in router.chosen:
            assert torch.equal(chosen[2], own[2, column])
            others = [0, 1, 3, 4]
            assert torch.equal(chosen[others], rows[others][:, column].long())
        assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0


def test_observing_does_not_count_marked_rows() -> None:
    """Every row but token 2's is given other experts than the model's own; unmarked they would all differ in both layers."""
    model = Model()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    replay = RoutingReplay([model], Router)
    _, own = record(model, replay, x)
    given = (own + 1) % EXPERTS  # another set, as K < EXPERTS
    assert K < EXPERTS
    given = given.to(torch.int16)
    given[2] = LIVE
    with replay.session("observe", [given], micro_batches=1, real_rows=[torch.ones(len(given), dtype=torch.bool)]) as session:
        replay.start_micro_batch(0, 0)
        model(x)
    assert session.differing[0].tolist() == [2, 2, 0, 2, 2]
