"""Replay of truncated sampling (DeepSeek-V3.2's keep sampling mask; vLLM, prime-rl, SkyRL, slime; papers.md 10.1). Evidence [C].

    K_t = ids that the engine's top-p / top-k / min-p left to choose from at t, recorded with the answer
    log mu(a) = returned log-prob - log sum_{b in K_t} mu_full(b)       `rollout.ingest` subtracts it: SGLang does not renormalise
    log theta(a) = z_a - logsumexp_{b in K_t} z_b                       theta and old over the same ids, the label forced in

Without it every ratio carries a factor equal to the kept mass (measured mean 0.896 at top_p 0.8, top_k 1024; 1.001 after replay). The log Z
correction is what SGLang needs because it returns log-probs of the full distribution; engines that return renormalised ones (vLLM,
processed mode) need none. The sets are bounded by rollout.keep_sets ids a token. The restriction itself is applied in the actor's
log-softmax; nothing is masked, and entropy and KL are those of the truncated policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dvp import restricted
from .objective import Correction, Method, Tokens
from .params import MethodParams


@dataclass(frozen=True)
class KeepSetsConfig(MethodParams):
    """`keep_sets` has no parameters: the sampler's settings decide what is kept."""


def correct(tokens: Tokens, config: KeepSetsConfig) -> Correction:
    """See the module's formula; keeps every token. Metrics as `dvp`'s."""
    return restricted(tokens, torch.zeros_like(tokens.mask_T))


METHOD = Method(
    name="keep_sets",
    kind="vocabulary",
    config=KeepSetsConfig,
    apply=correct,
    paper="2512.02556",
    evidence="C",
    unit="vocabulary",
    summary="Evaluates all policies on the ids that the truncated sampler could choose from",
    needs=frozenset({"keep_sets"}),
)
