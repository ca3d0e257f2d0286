"""The chunked, fused vocabulary statistics against torch's own log_softmax; the oracle forms the whole [T, V] matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.actor import vocabulary
from megatron_rl.actor.logprobs import Support, VocabShard, VocabStats, vocabulary_stats

T, H, V, PADDED = 13, 8, 29, 32
ONE = VocabShard(start=0, true_size=V, group=None)


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=g)


def keep_sets(seed: int = 5, width: int = 6) -> Tensor:
    """Ragged rows of distinct ids; row 0 keeps everything, row 1 a single token."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(V, generator=g)[:width] for _ in range(T)])
    lengths = torch.randint(2, width + 1, (T,), generator=g)
    lengths[:2] = torch.tensor([0, 1])
    return torch.where(torch.arange(width) < lengths[:, None], rows, -1)


SUPPORTS: dict[str, Any] = {
    "whole": None,
    "min_p": Support(min_p=0.2),
    "keep": Support(keep_TK=keep_sets()),
    "min_p unforced": Support(min_p=0.2, force_label=False),
    "keep unforced": Support(keep_TK=keep_sets(), force_label=False),
}
every_support = pytest.mark.parametrize("name", SUPPORTS)


def oracle(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, support: Support | None) -> dict[str, Tensor]:
    """By the definitions of papers.md 10, from the whole matrix; differentiable."""
    z = (hidden @ weight[:V].T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    whole = z.log_softmax(-1)
    own = torch.nn.functional.one_hot(labels, V).bool()
    if support is None:
        keep = torch.ones_like(own)
    elif support.min_p is not None:
        keep = whole.exp() >= support.min_p * whole.exp().amax(-1, keepdim=True)
    else:
        assert support.keep_TK is not None
        keep = (support.keep_TK[:, :, None] == torch.arange(V)).any(1) | (support.keep_TK < 0).all(1, keepdim=True)
    inside = keep.gather(1, labels[:, None])[:, 0]
    forced = support is None or support.force_label
    if forced:
        keep = keep | own
    log_p = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
    logp = z.masked_fill(~(keep | own), -torch.inf).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return {
        "logp": logp if forced else torch.where(inside, logp, logp.detach()),
        "entropy": -(log_p.exp() * torch.where(keep, log_p, 0.0)).sum(-1),
        "mass": (whole.exp() * keep).sum(-1).detach(),
        "inside": inside,
        "log_p": log_p.detach(),
    }


def check_values(found: VocabStats, wanted: dict[str, Tensor], ids: Tensor, rtol: float, atol: float) -> None:
    def close(a: Tensor | None, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)

    close(found.logp_T, wanted["logp"])
    close(found.entropy_T, wanted["entropy"])
    close(found.at_ids_TJ, torch.where(ids >= 0, wanted["log_p"].gather(1, ids.clamp(min=0)), -torch.inf))
    if found.kept_mass_T is not None:
        close(found.kept_mass_T, wanted["mass"])
        assert found.inside_T is not None and torch.equal(found.inside_T, wanted["inside"])
    best = wanted["log_p"].sort(dim=1, descending=True, stable=True)
    real = best.values[:, : found.top_ids_TK.shape[1]] > -torch.inf  # type: ignore[union-attr]
    assert torch.equal(found.top_ids_TK, torch.where(real, best.indices[:, : real.shape[1]], -1))
    torch.testing.assert_close(found.top_logp_TK.to(best.values.dtype), best.values[:, : real.shape[1]], rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]


@every_support
@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_whole_softmax(name: str, chunk: int, temperature: float) -> None:
    support = SUPPORTS[name]
    hidden, weight, labels = inputs()
    ids = torch.cat([labels[:, None], keep_sets(seed=8)], dim=1)
    upstream = torch.randn(2, T, generator=torch.Generator().manual_seed(1))
    wanted = oracle(hidden, weight, labels, temperature, support)
    loss = (wanted["logp"] * upstream[0] + wanted["entropy"] * upstream[1]).sum()
    found = vocabulary_stats(
        hidden, weight, labels, ONE, temperature=temperature, chunk=chunk, entropy=True, support=support, ids_TJ=ids, top_k=4
    )
    check_values(found, wanted, ids, rtol=2e-5, atol=2e-6)
    assert found.entropy_T is not None
    found_grads = torch.autograd.grad((found.logp_T * upstream[0] + found.entropy_T * upstream[1]).sum(), (hidden, weight))
    for a, b in zip(found_grads, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=5e-6)


@every_support
@pytest.mark.parametrize("entropy", [False, True])
def test_the_backward_is_the_derivative_of_the_forward(name: str, entropy: bool) -> None:
    """Against finite differences in fp64, along random directions. Unforced labels outside are left out: their gradient is 0 by decree."""
    support = SUPPORTS[name]
    hidden, weight, labels = inputs(torch.float64)

    def values(h: Tensor, w: Tensor) -> Tensor:
        stats = vocabulary_stats(h, w, labels, ONE, temperature=0.8, chunk=5, entropy=entropy, support=support)
        logp_T = stats.logp_T if stats.inside_T is None else torch.where(stats.inside_T, stats.logp_T, 0.0)
        return logp_T if stats.entropy_T is None else torch.stack([logp_T, stats.entropy_T])

    assert torch.autograd.gradcheck(values, (hidden, weight), fast_mode=True)


def test_only_what_is_asked_for_comes_back() -> None:
    stats = vocabulary_stats(*inputs(), ONE)
    assert [name for name, value in vars(stats).items() if value is not None] == ["logp_T"]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", [n for n in SUPPORTS if n != "whole"])
def test_pruned_columns_have_exactly_no_gradient(name: str, entropy: bool) -> None:
    """hidden = identity rows make each position's logits its own, so the gradient of the weight shows each (position, column) pair."""
    support = SUPPORTS[name]
    hidden = torch.eye(T)
    weight = torch.randn(PADDED, T, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = inputs()[2]
    stats = vocabulary_stats(hidden, weight, labels, ONE, entropy=entropy, support=support, chunk=4)
    loss = stats.logp_T.sum() if stats.entropy_T is None else (stats.logp_T + stats.entropy_T).sum()
    (grad_VT,) = torch.autograd.grad(loss, weight)
    member = oracle(hidden, weight.detach(), labels, 1.0, support)["log_p"] > -torch.inf
    assert member.any() and (~member).any()
    assert (grad_VT[:V].T[~member] == 0).all()
    assert (grad_VT[V:] == 0).all()
    if entropy:
        assert (grad_VT[:V].T[member & (member.sum(1, keepdim=True) > 1)] != 0).all()


def test_an_unforced_label_outside_gets_a_finite_value_and_no_gradient() -> None:
    hidden, weight, labels = inputs()
    stats = vocabulary_stats(hidden, weight, labels, ONE, support=SUPPORTS["keep unforced"])
    assert stats.inside_T is not None and (~stats.inside_T).any()
    (grad_TH,) = torch.autograd.grad(stats.logp_T.sum(), hidden)
    assert torch.isfinite(stats.logp_T).all()
    assert (grad_TH[~stats.inside_T] == 0).all()
    assert (grad_TH[stats.inside_T] != 0).any()


@pytest.mark.parametrize("name", ["min_p", "keep"])
def test_restricted_log_prob_is_the_unrestricted_one_less_log_of_the_kept_mass(name: str) -> None:
    hidden, weight, labels = inputs(torch.float64)
    restricted = vocabulary_stats(hidden, weight, labels, ONE, support=SUPPORTS[name])
    assert restricted.kept_mass_T is not None
    whole = vocabulary_stats(hidden, weight, labels, ONE)
    torch.testing.assert_close(restricted.logp_T, whole.logp_T - restricted.kept_mass_T.log(), rtol=1e-12, atol=1e-12)


def test_a_support_that_prunes_nothing_changes_nothing() -> None:
    hidden, weight, labels = inputs()
    whole = vocabulary_stats(hidden, weight, labels, ONE, entropy=True)
    nothing, everything = torch.full((T, 3), -1), torch.arange(V).repeat(T, 1)
    keeps = [Support(keep_TK=ids, force_label=forced) for ids in (nothing, nothing[:, :0], everything) for forced in (True, False)]
    for support in [Support(min_p=1e-30), *keeps]:
        stats = vocabulary_stats(hidden, weight, labels, ONE, entropy=True, support=support)
        assert torch.equal(stats.logp_T, whole.logp_T)
        assert stats.entropy_T is not None and whole.entropy_T is not None and torch.equal(stats.entropy_T, whole.entropy_T)
        assert stats.inside_T is not None and stats.inside_T.all()
        torch.testing.assert_close(stats.kept_mass_T, torch.ones(T))


@pytest.mark.parametrize("gap", [50.0, 500.0])
def test_keep_sets_far_from_the_likeliest_token(gap: float) -> None:
    """Sets shipped by a stale engine may hold only what is now the tail: exp(-500) is 0 in fp32, the restricted law is still exact."""
    hidden = torch.ones(2, 1)
    weight = torch.zeros(PADDED, 1)
    weight[0] = gap
    weight[4] = 1.0
    labels = torch.tensor([4, 0])  # inside; outside, above everything kept, and forced
    stats = vocabulary_stats(hidden, weight, labels, ONE, entropy=True, support=Support(keep_TK=torch.tensor([[3, 4], [3, 4]])))
    logp = torch.tensor([1.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(stats.logp_T, torch.tensor([logp[0], 0.0]))
    assert stats.entropy_T is not None
    torch.testing.assert_close(stats.entropy_T, torch.tensor([-(logp.exp() * logp).sum(), 0.0]))
    unforced = Support(keep_TK=torch.tensor([[3, 4], [3, 4]]), force_label=False)
    stats = vocabulary_stats(hidden.requires_grad_(), weight, labels, ONE, entropy=True, support=unforced)
    assert stats.inside_T is not None and stats.inside_T.tolist() == [True, False]
    (grad,) = torch.autograd.grad(stats.logp_T.sum() + stats.entropy_T.sum(), hidden)  # type: ignore[union-attr]
    assert torch.isfinite(grad).all() and torch.isfinite(stats.logp_T).all()


def test_padded_columns_have_no_mass_and_exactly_no_gradient() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        weight[V:] = 100.0  # would take all the mass if it counted
    logp = vocabulary_stats(hidden, weight, labels, ONE).logp_T
    (grad,) = torch.autograd.grad(logp.sum(), weight)
    assert torch.equal(grad[V:], torch.zeros_like(grad[V:]))
    assert torch.isfinite(logp).all()


@pytest.mark.parametrize("name", ["whole", "min_p"])
def test_bf16_keeps_fp32_sums(name: str) -> None:
    """Every product has 8 significant bits (entries are quarters up to 2), so bf16 logits are exact but for their last rounding, which
    the oracle shares; what remains is the error of fp32 sums. The oracle's gradients are fp32 until one last rounding (2^-8)."""
    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randint(-8, 9, (n, H), generator=g).float() / 4 for n in (T, PADDED))
    labels = inputs()[2]
    z = (hidden @ weight[:V].T).bfloat16().float().requires_grad_()
    eye = torch.eye(V)
    wanted = oracle(z, torch.cat([eye, eye[: PADDED - V]]), labels, 1.0, SUPPORTS[name])
    (grad_z,) = torch.autograd.grad((wanted["logp"] + wanted["entropy"]).sum(), z)
    h16, w16 = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    found = vocabulary_stats(h16, w16, labels, ONE, chunk=4, entropy=True, support=SUPPORTS[name])
    assert found.logp_T.dtype == torch.float32 and found.entropy_T is not None
    torch.testing.assert_close(found.logp_T, wanted["logp"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy_T, wanted["entropy"], rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((found.logp_T + found.entropy_T).sum(), (h16, w16))
    for grad, exact in zip(grads, (grad_z @ weight[:V], grad_z.T @ hidden), strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad[: len(exact)].float(), exact, rtol=2**-7, atol=2**-6)


def test_an_fp32_head_on_bf16_hidden_states_projects_in_fp32() -> None:
    hidden, weight, labels = inputs()
    low = hidden.detach().bfloat16().requires_grad_()
    found = vocabulary_stats(low, weight, labels, ONE)
    torch.testing.assert_close(found.logp_T, oracle(low.float(), weight, labels, 1.0, None)["logp"], rtol=2e-5, atol=2e-6)
    grads = torch.autograd.grad(found.logp_T.sum(), (low, weight))
    assert [x.dtype for x in grads] == [torch.bfloat16, torch.float32]


def test_tied_embeddings_get_both_gradients() -> None:
    _, weight, labels = inputs()
    tokens = labels.roll(1)

    def through(statistic: Any) -> Tensor:
        (grad,) = torch.autograd.grad(statistic(torch.tanh(weight[tokens]), weight).sum(), weight)
        return grad

    found = through(lambda h, w: vocabulary_stats(h, w, labels, ONE, chunk=5).logp_T)
    wanted = through(lambda h, w: oracle(h, w, labels, 1.0, None)["logp"])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=5e-6)


def test_one_frozen_side_gets_no_gradient() -> None:
    hidden, weight, labels = inputs()
    wanted = torch.autograd.grad(vocabulary_stats(hidden, weight, labels, ONE).logp_T.sum(), (hidden, weight))
    for h, w, want in ((hidden, weight.detach(), wanted[0]), (hidden.detach(), weight, wanted[1])):
        (grad,) = torch.autograd.grad(vocabulary_stats(h, w, labels, ONE).logp_T.sum(), h if h.requires_grad else w)
        assert torch.equal(grad, want)


def test_no_position_at_all() -> None:
    """A rank whose micro-batch is empty still runs backward."""
    hidden, weight, labels = inputs()
    stats = vocabulary_stats(hidden[:0], weight, labels[:0], ONE, entropy=True, support=Support(min_p=0.1), top_k=2)
    assert [tuple(x.shape) for x in vars(stats).values() if x is not None] == [(0,), (0,), (0,), (0,), (0, 2), (0, 2)]
    (grad,) = torch.autograd.grad(stats.logp_T.sum(), weight)
    assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_and_tiles_change_nothing_but_rounding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = inputs(dtype)
    whole = vocabulary_stats(hidden, weight, labels, ONE, entropy=True)
    wanted = torch.autograd.grad(whole.logp_T.sum(), (hidden, weight))
    monkeypatch.setattr(vocabulary, "BLOCK_COLUMNS", 7)
    monkeypatch.setitem(vocabulary.TILE_ELEMENTS, "cpu", 2 * V)
    cut = vocabulary_stats(hidden, weight, labels, ONE, entropy=True, chunk=5)
    found = torch.autograd.grad(cut.logp_T.sum(), (hidden, weight))
    for a, b in zip((cut.logp_T, cut.entropy_T, *found), (whole.logp_T, whole.entropy_T, *wanted), strict=True):
        torch.testing.assert_close(a, b)
