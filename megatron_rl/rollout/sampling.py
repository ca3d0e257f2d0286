"""How answers are sampled, and what a request asks of SGLang for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from megatron_rl.config import RolloutConfig


@dataclass(frozen=True)
class Sampling:
    """How to sample, and what to bring back about the tokens that were not sampled.

    Raises:
        ValueError: the distribution is truncated without `keep_sets`, or to one token.
    """

    temperature: float = 1.0
    """0 is greedy; truncation then means nothing and is left out."""
    max_new_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end of sequence."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this mass."""
    top_k: int = -1
    """Only so many of the likeliest tokens; -1 for all."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest."""
    keep_sets: int = 0
    """Most tokens that top_p, top_k and min_p may leave at one position."""
    candidates: int = 0
    """How many of the likeliest tokens to return for each position; all where the vocabulary has fewer."""

    def __post_init__(self) -> None:
        if self.truncates and self.keep_sets < 1:
            raise ValueError(
                f"keep_sets: {self.keep_sets} must be positive where top_p {self.top_p}, top_k {self.top_k}, min_p {self.min_p} truncate: "
                "without the kept tokens nothing can be normalised over them; set it to top_k, or to the most tokens top_p or min_p leave"
            )
        if self.truncates and self.top_k == 1:
            raise ValueError("top_k: 1 leaves one token, whose log-prob is always 0; set temperature to 0 for greedy answers")

    @classmethod
    def from_config(cls, config: RolloutConfig, *, candidates: int = 0) -> Self:
        """As training samples."""
        return cls(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            keep_sets=config.keep_sets,
            candidates=candidates,
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled, so that log-probs must be normalised over the others."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)

    @property
    def bounded(self) -> bool:
        """Whether top_k alone keeps every set within keep_sets (tokens tied at the cut-off apart)."""
        return 0 < self.top_k <= self.keep_sets

    def request(self, vocab_size: int) -> dict[str, Any]:
        """The fields of SGLang's /generate that say all this.

        SGLang names the tokens its sampler could choose from only below a finite top_k. Where none was asked for it gets one more
        than `keep_sets`: a set that reaches it was cut, which ingest refuses; all others are as they would be without it.
        """
        top_k = min(self.top_k if self.bounded else self.keep_sets + 1, vocab_size) if self.truncates else self.top_k
        body: dict[str, Any] = {
            "sampling_params": {
                "temperature": self.temperature,
                "max_new_tokens": self.max_new_tokens,
                "top_p": self.top_p,
                "top_k": top_k,
                "min_p": self.min_p,
                "stop_token_ids": list(self.stop_token_ids),
            },
            "return_logprob": True,
        }
        if self.truncates:
            body["return_sampling_mask"] = True
            body["sampling_logprobs_mode"] = "support" if self.candidates else "selected"
        elif self.candidates:
            # more of them than there are tokens would end the server
            body["top_logprobs_num"] = min(self.candidates, vocab_size)
            body["return_flat_raw_output_top_logprobs"] = True
            body["return_flat_raw_top_logprobs_b64"] = True
        return body
