"""Small decision trees, enumerated exactly: every sequence of T tokens out of V, with random policies and a random reward.

Legend: P paths (V^T), T positions, V vocabulary. All fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """A reward for every path and two policies."""

    mu: list[Tensor]
    """At depth t, [V^t, V] probabilities in each context."""
    pi: list[Tensor]
    reward_P: Tensor

    @property
    def horizon(self) -> int:
        return len(self.mu)

    @property
    def vocabulary(self) -> int:
        return self.mu[0].shape[1]

    def context(self, t: int) -> Tensor:
        """[P] which context of depth t each path passes through."""
        return torch.arange(len(self.reward_P)) // self.vocabulary ** (self.horizon - t)

    def token(self, t: int) -> Tensor:
        """[P] the token each path takes at depth t."""
        return self.context(t + 1) % self.vocabulary

    def logp(self, policy: list[Tensor]) -> Tensor:
        """[P, T] log-probs of each path's tokens."""
        return torch.stack([policy[t][self.context(t), self.token(t)] for t in range(self.horizon)], dim=1).log()

    def value(self, policy: list[Tensor]) -> Tensor:
        """J: the expected reward."""
        return (self.logp(policy).sum(1).exp() * self.reward_P).sum()

    def under(self, policy: list[Tensor], x_P: Tensor) -> Tensor:
        """E[x] over paths drawn from the policy; further dimensions are kept."""
        return torch.einsum("p,p...->...", self.logp(policy).sum(1).exp(), x_P)

    def return_to_go(self, policy: list[Tensor], t: int) -> Tensor:
        """[P] E_policy[R | the path's first t tokens]."""
        weight_P = self.logp(policy)[:, t:].sum(1).exp() * self.reward_P
        return weight_P.reshape(self.vocabulary**t, -1).sum(1)[self.context(t)]

    def advantage(self, policy: list[Tensor]) -> Tensor:
        """[P, T] A_t = E[R | first t + 1 tokens] - E[R | first t tokens]."""
        return torch.stack([self.return_to_go(policy, t + 1) - self.return_to_go(policy, t) for t in range(self.horizon)], dim=1)

    def per_context(self, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[P, T] a divergence (mu [C, V], pi [C, V]) -> [C] of the two policies in every context that a path passes through."""
        return torch.stack([f(self.mu[t], self.pi[t])[self.context(t)] for t in range(self.horizon)], dim=1)

    @property
    def log_rho(self) -> Tensor:
        """[P, T]."""
        return self.logp(self.pi) - self.logp(self.mu)


def tv(mu: Tensor, pi: Tensor) -> Tensor:
    """[C] total variation."""
    return (mu - pi).abs().sum(1) / 2


def kl(mu: Tensor, pi: Tensor) -> Tensor:
    """[C] KL(mu || pi)."""
    return (mu * (mu / pi).log()).sum(1)


def random_tree(seed: int, vocabulary: int = 3, horizon: int = 4, distance: float = 0.5) -> Tree:
    """Logits of pi are those of mu plus `distance` times a standard normal; rewards are uniform in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(vocabulary**t, vocabulary, generator=generator, dtype=torch.float64) for t in range(horizon)]
    moved = [x + distance * torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in logits]
    reward_P = torch.rand(vocabulary**horizon, generator=generator, dtype=torch.float64)
    return Tree([x.softmax(1) for x in logits], [x.softmax(1) for x in moved], reward_P)
