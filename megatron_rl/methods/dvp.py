"""Dynamic vocabulary pruning (2512.23087): every policy restricted to the tokens that are not in its extreme tail. Evidence [A][I].

    S(c) = { a : pi(a|c) >= rho max_b pi(b|c) }            after temperature; membership carries no gradient
    pi^S = pi 1_S / Z,   Z = sum_{a in S} pi(a|c)          the objective's log-probs are log pi^S, theta's and old's alike

The min-p rule for S is inferred [I]: the paper's membership rule and its rho were not visible. How the engine's support agrees (`support`):

    engine     the engine samples with the same min-p = rho; mu^S = returned - log Z_mu (`rollout.ingest` subtracts the log of the
               kept mass). Membership differs at the boundary now and then: there the label is forced into theta's support
    keep_sets  the engine returns the ids it could choose from, and theta, old and mu are all evaluated on those
    unpruned   the engine samples from everything, theta is pruned: theta^S/mu is a valid ratio, 0 for a label outside S.
               reach token: that token gets weight 0; suffix: so do all after it (a prefix product is 0 from there on);
               sequence: so does the whole answer (a product over the sequence is 0). Choose the reach of the objective's ratio

The restriction itself is applied in the actor's log-softmax; here are only the masks and metrics that follow from it. Rejected tokens stay
in the denominator. Bias of the restriction: |J(pi) - J(pi^S)| <= P(some token not in S) <= T max (1 - Z). Entropy and KL are of pi^S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .objective import Correction, Method, Need, Tokens
from .params import MethodParams

Reach = Literal["token", "suffix", "sequence"]


@dataclass(frozen=True)
class DVPConfig(MethodParams):
    """Parameters of `dvp`."""

    rho: float = 1e-5
    """Smallest probability kept, as a share of the likeliest token's. Never confirmed; e^-13 = 2.3e-6 is a plausible start as well."""
    support: Literal["engine", "keep_sets", "unpruned"] = "engine"
    """How the engine's support and the trainer's agree."""
    reach: Reach = "token"
    """For unpruned: what a label outside the support takes with it. suffix for prefix weights, sequence for sequence weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rho", 0 < self.rho < 1, "must be in (0, 1); 1e-5 is a start")


def restricted(tokens: Tokens, dropped_T: Tensor) -> Correction:
    """Weight 1, without the tokens of `dropped_T`, and what every restriction reports.

    Metrics: `outside_share` labels outside the support; `kept_mass_mean` theta's Z; `pruned_mass_square_mean` the mean of (1 - Z)^2, whose
    root lies between the mean and the largest pruned mass; `kept_share` if something was dropped.
    """
    assert tokens.inside_T is not None and tokens.kept_mass_T is not None, "the loop must provide the support's statistics"
    metrics = {
        "outside_share": tokens.share(~tokens.inside_T),
        "kept_mass_mean": tokens.average(tokens.kept_mass_T),
        "pruned_mass_square_mean": tokens.average((1 - tokens.kept_mass_T).square()),
    }
    return Correction.mask(~dropped_T, tokens, metrics)


def reached_T(tokens: Tokens, reach: Reach) -> Tensor:
    """[T] bool, the loss tokens that labels outside the support take with them, themselves included."""
    assert tokens.inside_T is not None
    outside_T = (~tokens.inside_T).to(tokens.advantages_T.dtype)
    if reach == "suffix":
        outside_T = tokens.segments.prefix_sum(outside_T)
    elif reach == "sequence":
        outside_T = tokens.segments.spread(tokens.segments.sum(outside_T))
    return outside_T > 0


def correct(tokens: Tokens, config: DVPConfig) -> Correction:
    """See the module's formula. Only unpruned drops anything: elsewhere a label outside was forced into the support."""
    if config.support == "unpruned":
        return restricted(tokens, reached_T(tokens, config.reach))
    return restricted(tokens, torch.zeros_like(tokens.mask_T))


def _needs(config: DVPConfig) -> frozenset[Need]:
    needs: dict[str, frozenset[Need]] = {
        "engine": frozenset({"min_p_sampling"}),
        "keep_sets": frozenset({"keep_sets"}),
        "unpruned": frozenset(),
    }
    return needs[config.support]


METHOD = Method(
    name="dvp",
    kind="vocabulary",
    config=DVPConfig,
    apply=correct,
    paper="2512.23087",
    evidence="AI",
    unit="vocabulary",
    summary="Restricts all policies to tokens above a share of the likeliest one's probability",
    needs=_needs,
)
