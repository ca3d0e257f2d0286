"""Trust Region Masking (2512.23075): a sequence that leaves the trust region anywhere leaves the batch. Evidence [F]; sampled forms [F].

    max             keep_i = 1[ max_t D_t <= max_threshold ]
    mean            keep_i = 1[ mean_t D_t <= mean_threshold ]
    both            the two together
    length_neutral  keep_i = 1[ W/Z <= ratio_threshold ],  W = sum |rho_t - 1| w_t,  Z = sum w_t,
                    w_t = min(1, (T - t) epsilon, sqrt((T - t) delta / 2))
    ser             keep_i = 1[ mean_t |rho_t - 1| <= ratio_threshold ]

D is KL(mu || theta) at each token. sampled: k2 for the maximum (k3 is lopsided for small ratios) and k3 for the mean, as the paper
substitutes; top_k: the KL of the partition {each of the likeliest K}, {label}, {rest}, a lower bound; exact: the sum over the whole
vocabulary, the paper's own form. exact makes the rollout return (or the old forward keep) all V log-probs of every token, so it is for
small vocabularies and calibration runs. Rejected sequences stay in the denominator. With objective `policy_gradient` (weight theta/mu,
seq-mean-token-sum) this is the paper's loss. Watch that acceptance stays above 70 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .divergence import divergence_T, top_k_needs
from .estimators import exact_kl, k2, k3
from .objective import WHOLE_VOCABULARY, Correction, Method, Need, Pair, Tokens, pair_needs, ratio
from .params import CorrectionParams

_DEFAULTS = {"max": (0.05, None), "mean": (None, 0.001), "both": (0.1, 0.002)}


@dataclass(frozen=True)
class TRMConfig(CorrectionParams):
    """Parameters of `trm`."""

    criterion: Literal["max", "mean", "both", "length_neutral", "ser"] = "both"
    """Which sequences go."""
    source: Literal["sampled", "top_k", "exact"] = "sampled"
    """Where the KL of max, mean and both comes from."""
    candidates: int = 20
    """K of source top_k."""
    max_threshold: float | None = None
    """Nats at one token; null takes the paper's: 0.05 for max, 0.1 for both."""
    mean_threshold: float | None = None
    """Nats a token; null takes the paper's: 0.001 for mean, 0.002 for both."""
    ratio_threshold: float = 0.1
    """For ser (the paper: 0.03 to 0.10) and length_neutral (value not confirmed)."""
    epsilon: float = 0.1
    """For length_neutral: the largest TV at one token."""
    delta: float = 0.05
    """For length_neutral: the largest KL at one token, nats."""
    pair: Pair = "theta/mu"
    """Which two policies; old/mu judges the engine gap alone, once a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_threshold", "mean_threshold", "ratio_threshold", "epsilon", "delta"):
            value = getattr(self, name)
            self.require(name, value is None or value > 0, "must be positive")
        self.require("source", self.source == "sampled" or self.pair != "old/mu", "scores theta; set pair to theta/mu or theta/old")
        self.require("candidates", self.candidates >= 1, "must be at least 1; DPPO's value is 20")


def _distances_T(tokens: Tokens, config: TRMConfig) -> tuple[Tensor, Tensor]:
    """[T] the KL that the maximum looks at and the one that the mean looks at, nats."""
    if config.source == "sampled" or config.pair == "old/mu":
        log_T = tokens.detached_log_ratio(config.pair)
        return k2(log_T), k3(log_T)
    if config.source == "exact":
        every = tokens.top_k(config.pair)
        kl_T = exact_kl(every.logp_TK, every.base_logp_TK)
    else:
        kl_T = divergence_T(tokens, "top_k_kl", config.pair)
    return kl_T, kl_T


def _accept_S(tokens: Tokens, config: TRMConfig) -> Tensor:
    """[S] verdicts of max, mean and both."""
    for_max_T, for_mean_T = _distances_T(tokens, config)
    largest, mean = _DEFAULTS[config.criterion]
    accept_S = torch.ones_like(tokens.segments.count(), dtype=torch.bool)
    if largest is not None:
        accept_S &= tokens.segments.max(for_max_T) <= (config.max_threshold or largest)
    if mean is not None:
        accept_S &= tokens.segments.mean(for_mean_T) <= (config.mean_threshold or mean)
    return accept_S


def position_weight_T(tokens: Tokens, epsilon: float, delta: float) -> Tensor:
    """[T] w_t of length_neutral: how far an error at t can still reach. 0 at the last token."""
    segments = tokens.segments
    left_T = (segments.spread(segments.count()) - segments.prefix_count()).to(tokens.advantages_T.dtype)
    return torch.minimum((left_T * epsilon).clamp(max=1), (left_T * delta / 2).sqrt())


def correct(tokens: Tokens, config: TRMConfig) -> Correction:
    """See the module's formula."""
    segments = tokens.segments
    deviation_T = (ratio(tokens.detached_log_ratio(config.pair)) - 1).abs()
    if config.criterion == "ser":
        accept_S = segments.mean(deviation_T) <= config.ratio_threshold
    elif config.criterion == "length_neutral":
        weight_T = position_weight_T(tokens, config.epsilon, config.delta)
        accept_S = segments.sum(deviation_T * weight_T) <= config.ratio_threshold * segments.sum(weight_T)
    else:
        accept_S = _accept_S(tokens, config)
    keep_T = segments.spread(accept_S.to(deviation_T.dtype)) > 0
    return Correction.mask(keep_T, tokens, {"deviation_mean": tokens.average(deviation_T)})


def _needs(config: TRMConfig) -> frozenset[Need]:
    if config.source == "sampled" or config.pair == "old/mu":
        return pair_needs(config.pair)
    return pair_needs(config.pair) | top_k_needs(config.pair)


def _candidates(config: TRMConfig) -> int:
    return WHOLE_VOCABULARY if config.source == "exact" else config.candidates


METHOD = Method(
    name="trm",
    kind="correction",
    config=TRMConfig,
    apply=correct,
    paper="2512.23075",
    evidence="F",
    unit="sequence",
    summary="Drops sequences that leave the trust region",
    needs=_needs,
    candidates=_candidates,
)
