"""Divergences of two policies from samples, from a partition of the vocabulary, or exactly (papers.md 1.3, 1.4).

Sample forms take d = log pi - log mu of a token drawn from mu. Partition forms (binary, top-K) merge tokens, which can only shrink a
divergence: a mask driven by them is necessary, not sufficient, for a trust region. KL is KL(mu || pi) unless named otherwise. Nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tokens import LOG_RATIO_LIMIT

GUARD = 1e-8
"""Added inside logarithms of the partition KLs, as in the public code of DPPO (2602.04879)."""


def k1(d: Tensor) -> Tensor:
    """-d: unbiased for KL(mu || pi), signed."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: biased, >= 0, symmetric."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """e^d - 1 - d: unbiased for KL(mu || pi), >= 0."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def reverse_kl(d: Tensor) -> Tensor:
    """rho d - rho + 1 with rho = e^d: unbiased under mu for KL(pi || mu), >= 0."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.exp() * d - torch.expm1(d)


def binary_tv(logp: Tensor, behaviour_logp: Tensor) -> Tensor:
    """|mu(a) - pi(a)|: the partition {a}, {rest}."""
    return (logp.exp() - behaviour_logp.exp()).abs()


def binary_kl(logp: Tensor, behaviour_logp: Tensor) -> Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) of the partition {a}, {rest}."""
    mu = behaviour_logp.exp()
    rest_mu, rest_pi = -torch.expm1(behaviour_logp), -torch.expm1(logp)
    kl = mu * (behaviour_logp - logp) + rest_mu * torch.log((rest_mu + GUARD) / (rest_pi + GUARD))
    return kl.clamp(min=0)


def partition(label_logp_T: Tensor, candidates_TK: Tensor, has_label_T: Tensor) -> Tensor:
    """[T, K + 2] one policy's probabilities of {each of the top-K}, {label}, {rest}.

    The label's own cell is empty where it is among the K. "rest" is 1 minus the others, in fp32 or better, at least 0.
    """
    own_T = torch.where(has_label_T, torch.zeros_like(label_logp_T), label_logp_T.exp())
    named = torch.cat([candidates_TK.exp(), own_T[:, None]], dim=1)
    return torch.cat([named, (1 - named.sum(dim=1, keepdim=True)).clamp(min=0)], dim=1)


def partition_tv(pi: Tensor, mu: Tensor) -> Tensor:
    """[T] total variation of two policies on the same partition; binary <= top-K <= exact."""
    return (pi - mu).abs().sum(dim=1) / 2


def partition_kl(pi: Tensor, mu: Tensor) -> Tensor:
    """[T] KL(mu || pi) on the same partition; binary <= top-K <= exact."""
    return (mu * torch.log((mu + GUARD) / (pi + GUARD))).sum(dim=1).clamp(min=0)


def exact_tv(logp_V: Tensor, behaviour_logp_V: Tensor) -> Tensor:
    """1/2 sum_a |mu(a) - pi(a)| over the last dimension, the whole vocabulary."""
    return (logp_V.exp() - behaviour_logp_V.exp()).abs().sum(dim=-1) / 2


def exact_kl(logp_V: Tensor, behaviour_logp_V: Tensor) -> Tensor:
    """KL(mu || pi) over the last dimension, the whole vocabulary. A token that mu never samples adds 0."""
    mu = behaviour_logp_V.exp()
    return torch.where(mu > 0, mu * (behaviour_logp_V - logp_V), 0.0).sum(dim=-1)
