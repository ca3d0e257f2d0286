"""Exact divergences from chunks of hidden states against their definitions over the whole [T, V] matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.actor.divergences import exact_divergences
from megatron_rl.actor.logprobs import VocabShard

T, H, V, PADDED = 13, 8, 29, 32
ONE = VocabShard(start=0, true_size=V, group=None)


def inputs(seed: int, hidden_size: int = H) -> tuple[Tensor, Tensor]:
    """fp64 hidden states and output projection, padding included."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, hidden_size, generator=g, dtype=torch.float64), torch.randn(PADDED, hidden_size, generator=g, dtype=torch.float64)


def log_law(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight[:V].T / temperature).log_softmax(-1)


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_the_definitions(chunk: int, temperature: float) -> None:
    """The two models may differ in size."""
    this, other = inputs(0), inputs(3, hidden_size=5)
    log_p, log_q = log_law(*this, temperature), log_law(*other, temperature)
    kl, tv = exact_divergences(this[0].requires_grad_(), this[1], *other, ONE, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(kl, (log_q.exp() * (log_q - log_p)).sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tv, (log_q.exp() - log_p.exp()).abs().sum(1) / 2, rtol=1e-12, atol=1e-12)
    assert not kl.requires_grad


def test_laws_that_hardly_overlap_stay_finite() -> None:
    """Logits 300 apart in fp32: all the mass moves, so TV = 1 and the KL is the 300 nats."""
    hidden, weight, other = torch.ones(1, 1), torch.zeros(PADDED, 1), torch.zeros(PADDED, 1)
    weight[0], other[1] = 300.0, 300.0
    kl, tv = exact_divergences(hidden, weight, hidden, other, ONE)
    torch.testing.assert_close(torch.stack([kl[0], tv[0]]), torch.tensor([300.0, 1.0]))


def test_small_divergences_survive_fp32() -> None:
    """Policies 1e-4 apart in the weights: the KL is about 1e-8, a tenth of fp32's epsilon; as sum q (log q - log p) it would be noise.
    The TV is linear in the error of the logits, a few 1e-7."""
    hidden, weight = inputs(0)
    other = weight + 1e-4 * torch.randn(PADDED, H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    exact, exact_tv = exact_divergences(hidden, weight, hidden, other, ONE)
    assert exact.max() < 1e-6
    kl, tv = exact_divergences(hidden.float(), weight.float(), hidden.float(), other.float(), ONE)
    torch.testing.assert_close(kl.double(), exact, rtol=0.02, atol=0)
    torch.testing.assert_close(tv.double(), exact_tv, rtol=0.02, atol=5e-7)
    same = exact_divergences(hidden.float(), weight.float(), hidden.float(), weight.float(), ONE)
    assert not same[0].any() and not same[1].any()
