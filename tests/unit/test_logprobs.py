"""The chunked, fused log-probs against torch's own log_softmax; the oracle forms the whole [T, V] matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.actor.logprobs import VocabShard, best_tokens, logprobs

T, H, V, PADDED = 13, 8, 29, 32
ONE = VocabShard(start=0, true_size=V, group=None)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, H, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=g)


def oracle(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = ((hidden @ weight[:V].T).float() / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_whole_softmax(chunk: int, temperature: float) -> None:
    hidden, weight, labels = inputs(torch.float32)
    upstream = torch.randn(2, T, generator=torch.Generator().manual_seed(1))
    wanted = oracle(hidden, weight, labels, temperature)
    wanted_grads = torch.autograd.grad((wanted[0] * upstream[0] + wanted[1] * upstream[1]).sum(), (hidden, weight))
    found = logprobs(hidden, weight, labels, ONE, temperature=temperature, chunk=chunk)
    found_grads = torch.autograd.grad((found[0] * upstream[0] + found[1] * upstream[1]).sum(), (hidden, weight))
    for a, b in zip((*found, *found_grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_padded_columns_have_no_mass_and_exactly_no_gradient() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        weight[V:] = 100.0  # would take all the mass if it counted
    logp, _ = logprobs(hidden, weight, labels, ONE)
    (grad,) = torch.autograd.grad(logp.sum(), weight)
    assert torch.equal(grad[V:], torch.zeros_like(grad[V:]))
    assert torch.isfinite(logp).all()


def test_a_shard_of_padding_alone_adds_nothing() -> None:
    """A vocabulary that TP does not divide can leave a rank without one real column."""
    hidden, weight, labels = inputs(torch.float32)
    empty = VocabShard(start=V + 3, true_size=V, group=None)
    logits_free = logprobs(hidden.detach(), weight.detach(), labels, empty)[0]
    assert torch.isnan(logits_free).all() or torch.isinf(logits_free).all()  # alone it has no distribution; with its group it adds 0


def test_the_likeliest_token_is_the_smallest_id_among_equals() -> None:
    hidden = torch.eye(2, H)
    weight = torch.zeros(PADDED, H)
    weight[[3, 7], 0] = 5.0  # a tie for the first position
    weight[11, 1] = 2.0
    weight[V:, :] = 9.0  # padding never wins
    assert best_tokens(hidden, weight, ONE).tolist() == [3, 11]


def test_bf16_keeps_fp32_sums() -> None:
    """The projection is bf16, everything after it fp32: the error is that of the logits alone."""
    hidden, weight, labels = inputs(torch.bfloat16)
    wanted, _ = oracle(hidden, weight, labels, 1.0)
    found, _ = logprobs(hidden, weight, labels, ONE, chunk=4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
