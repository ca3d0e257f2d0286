"""The records that travel through a training step, each field with its shape, dtype and unit.

Shape letters used here and in all tensor code:
  N  tokens of one trajectory (prompt and response)      T  positions of one packed micro-batch (padding included)
  S  sequences of one packed micro-batch                 L  MoE layers of the whole model, in order of depth
  K  experts a token is sent to in one layer             V  vocabulary

Alignment: position t of a packed sequence holds input token t and predicts token t + 1. A trajectory of N tokens therefore
fills N - 1 positions, exactly the rows for which an engine reports routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One question put to the policy."""

    id: str
    tokens: NDArray[np.int32]
    """[N_prompt] token ids, as the tokenizer gave them; they are never re-tokenised."""
    text: str
    answer: str
    """What the verifier compares with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidates:
    """The likeliest K tokens of the behaviour policy at each position, whether sampled or not."""

    ids: NDArray[np.int32]
    """[N, K] in descending order of probability; -1 where there is none (prompt, tool output)."""
    logp: NDArray[np.float32]
    """[N, K] log mu of each, of the same distribution as behaviour_logp; -inf where there is none."""


@dataclass(frozen=True, order=True)
class Origin:
    """Where in a run an answer was sampled; no two answers of a run share one."""

    step: int
    """Rollout step, from 0."""
    leader: int
    """Data-parallel rank of the leader that asked."""
    call: int
    """Which of that leader's requests in the step, from 0: some methods sample more than once."""
    place: int
    """Among the answers to that request."""


@dataclass(frozen=True)
class Trajectory:
    """One sampled answer, with what the behaviour policy said of it."""

    prompt: Prompt
    group: str
    """Trajectories of one group answer the same prompt under one policy; advantages are taken within a group."""
    tokens: NDArray[np.int32]
    """[N] prompt and response ids."""
    loss_mask: NDArray[np.bool_]
    """[N] True where the policy sampled token n; False for the prompt and for tool output."""
    behaviour_logp: NDArray[np.float32]
    """[N] log mu(token n | tokens before n), natural log, of the distribution sampled from; NaN where loss_mask is False."""
    versions: NDArray[np.int32]
    """[N] weight version that sampled token n; -1 where loss_mask is False."""
    turns: NDArray[np.int32]
    """[N] index of the assistant turn, counted from 0; -1 where loss_mask is False."""
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None
    """[N - 1, L, K] expert ids of input token n in each MoE layer, ascending; None for dense models or when not asked for."""
    finish_reason: FinishReason
    text: str
    """The decoded response, for verifiers and people; training never reads it."""
    reward: float | None = None
    candidates: Candidates | None = None
    """The engine's likeliest tokens at every sampled position; None when not asked for."""
    keep_ids: NDArray[np.int32] | None = None
    """[N, K] every token the truncated sampler could have chosen at n, -1 where a row is shorter (all of it where loss_mask is False);
    None where sampling was not truncated. behaviour_logp is then of the truncated, renormalised distribution."""
    kept_mass: NDArray[np.float32] | None = None
    """[N] engine probability, before truncation, of the tokens in keep_ids; NaN where loss_mask is False."""
    routes_valid: NDArray[np.bool_] | None = None
    """[N - 1] False where a row of `routes` comes from other weights than the token sampled from it, so that it must not be replayed;
    None where every row may be."""
    origin: Origin | None = None
    """None where no run sampled it."""

    @property
    def response_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.loss_mask.sum())

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("loss_mask", "behaviour_logp", "versions", "turns"):
            assert len(getattr(self, name)) == n, f"{name} has {len(getattr(self, name))} entries for {n} tokens"
        assert n >= 2, f"a trajectory needs at least two tokens to predict one, got {n}"
        assert not self.loss_mask[0], "the first token has nothing to be predicted from"
        for name, rows in (("keep_ids", self.keep_ids), ("candidates", self.candidates.ids if self.candidates else None)):
            assert rows is None or (rows.ndim == 2 and len(rows) == n), f"{name} for {n} tokens"
        if self.routes is not None:
            assert self.routes.ndim == 3 and self.routes.shape[0] == n - 1, f"routes {self.routes.shape} for {n} tokens"
        if self.routes_valid is not None:
            assert self.routes is not None and self.routes_valid.shape == (n - 1,), f"routes_valid {self.routes_valid.shape} for {n} tokens"


@dataclass(frozen=True)
class Batch:
    """What one data-parallel leader collected for one step."""

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[NDArray[np.float32], ...]
    """One [N] array a trajectory: the advantage of token n (0 where loss_mask is False)."""
    values: tuple[NDArray[np.float32], ...] | None = None
    """One [N] array a trajectory: the critic's value of the state before token n; None without a critic."""
    returns: tuple[NDArray[np.float32], ...] | None = None
    """One [N] array a trajectory: what that value is trained towards; NaN where it is not."""

    def __post_init__(self) -> None:
        for name in ("advantages", "values", "returns"):
            arrays = getattr(self, name)
            assert arrays is None or len(arrays) == len(self.trajectories), (
                f"{len(arrays)} {name} for {len(self.trajectories)} trajectories"
            )

    @staticmethod
    def without_advantages(trajectories: Sequence[Trajectory]) -> Batch:
        """For what looks at no advantage, or takes them later: all are 0."""
        return Batch(tuple(trajectories), tuple(np.zeros(len(t.tokens), np.float32) for t in trajectories))

    def select(self, indices: Sequence[int]) -> Batch:
        """The batch of those trajectories alone."""

        def chosen(values: tuple[NDArray[np.float32], ...] | None) -> tuple[NDArray[np.float32], ...] | None:
            return None if values is None else tuple(values[i] for i in indices)

        return Batch(
            tuple(self.trajectories[i] for i in indices),
            tuple(self.advantages[i] for i in indices),
            chosen(self.values),
            chosen(self.returns),
        )


@dataclass(frozen=True)
class RouterScores:
    """What the routers of this rank's layers thought of the experts they chose."""

    experts_RLK: Tensor
    """int64 [rows, layers, K] the experts."""
    log_scores_RLK: Tensor
    """float32 natural log of their normalised scores over all experts."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: several sequences end to end, then padding, which forms a sequence of its own.

    Tensors indexed by T describe the prediction made at that position: `mask_T[t]` says that `labels_T[t]` carries loss.
    """

    tokens_T: Tensor
    """int64 input ids."""
    labels_T: Tensor
    """int64 the next token of the same sequence; 0 in padding."""
    positions_T: Tensor
    """int64 position inside the own sequence, from 0."""
    mask_T: Tensor
    """bool."""
    sequence_T: Tensor
    """int64 index of the sequence in this micro-batch, 0 .. S - 1 in order; padding carries S."""
    turns_T: Tensor
    """int64 assistant turn of the label, -1 where mask_T is False."""
    advantages_T: Tensor
    """float32."""
    behaviour_logp_T: Tensor
    """float32, log mu(label); NaN where mask_T is False."""
    versions_T: Tensor
    """int64 weight version that sampled the label; -1 where mask_T is False."""
    cu_seqlens: Tensor
    """int32 [S + 1] or, with padding, [S + 2]: where each sequence starts, and T."""
    sample_S: Tensor
    """int64 index of each sequence in the data-parallel leader's Batch; -1 for a filler."""
    routes_TLK: Tensor | None = None
    """uint8 or int16: this rank's rows and layers only, once `routing.layout` has cut it; k distinct experts in padding. int16 with
    `routing.layout.LIVE` in every row that may not be replayed."""
    candidate_ids_TK: Tensor | None = None
    """int64 the engine's likeliest tokens for the label's position, -1 where there is none."""
    candidate_logp_TK: Tensor | None = None
    """float32 log mu of each; -inf where there is none."""
    keep_TK: Tensor | None = None
    """int64 tokens the truncated sampler could have chosen, -1 where a row is shorter; a row of -1 alone keeps everything."""
    old_logp_T: Tensor | None = None
    """float32 log-probs under the trainer's weights at the start of the step; on the last pipeline stage only, like all that follows."""
    old_top_ids_TK: Tensor | None = None
    """int64 the likeliest tokens under those weights."""
    old_top_logp_TK: Tensor | None = None
    """float32 their log-probs under those weights."""
    reference_logp_T: Tensor | None = None
    """float32 log-probs under the frozen reference policy."""
    old_router: RouterScores | None = None
    """At the start of the step; of this rank's rows and layers, on every rank."""
    router_shift_T: Tensor | None = None
    """float32 mean |log router score now / at the start of the step| over layers and the experts chosen then."""
    values_T: Tensor | None = None
    """float32 the critic's value of the state before the label, at the start of the step."""
    returns_T: Tensor | None = None
    """float32 what the critic is trained towards."""

    @property
    def num_sequences(self) -> int:
        """S, fillers included, padding not."""
        return int(self.sample_S.numel())

    @property
    def real_T(self) -> Tensor:
        """bool, False in padding and in fillers."""
        return self.sequence_T < int((self.sample_S >= 0).sum())

    @property
    def length(self) -> int:
        """T."""
        return int(self.tokens_T.numel())


@dataclass(frozen=True)
class TokenStats:
    """What the last pipeline stage says of each label."""

    logp_T: Tensor
    """float32 natural log-prob of the label at the sampling temperature; carries the gradient in training."""
    entropy_T: Tensor | None = None
    """float32 nats."""
    inside_T: Tensor | None = None
    """bool, the label is in the support that the policy is restricted to; None without restriction."""
    kept_mass_T: Tensor | None = None
    """float32 probability of that support before renormalisation."""
    top_ids_TK: Tensor | None = None
    """int64 the likeliest tokens, where asked for."""
    top_logp_TK: Tensor | None = None
    """float32 their log-probs."""
    candidate_logp_TK: Tensor | None = None
    """float32 log-probs of the batch's candidates, where it has them."""
    old_top_logp_TK: Tensor | None = None
    """float32 log-probs of the batch's old top-K, where it has one."""


Metric = tuple[Tensor, Tensor]
"""(numerator, denominator), both scalar fp32 or fp64; reduced over micro-batches and ranks before the division."""


def as_metric(numerator: Tensor | float, denominator: Tensor | float) -> Metric:
    """A metric pair on numerator's device, detached, in fp64 so that sums over a large batch keep their digits."""
    value = torch.as_tensor(numerator).detach().to(torch.float64)
    return value, torch.as_tensor(denominator, dtype=torch.float64, device=value.device).detach()
