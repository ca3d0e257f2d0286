"""What a reply says of tokens that were not sampled: the likeliest ones, and all that truncated sampling could have chosen.

Schema of SGLang 0.5.23's `meta_info`:
  `output_top_logprobs_*`            the likeliest tokens before truncation, as base64 of little-endian [M, K] arrays.
  `output_token_sampling_mask`       for each token the ids its sampler could choose from, likeliest first, as the sampler itself had them.
  `output_token_sampling_logprobs`   log-probs over those ids alone: of the sampled token, or ("support" mode) of each of them.
`output_token_logprobs` are always of the whole vocabulary, so they lack the division by the mass Z of the kept tokens.

Shapes: M sampled tokens, K columns.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Candidates

TOLERANCE = 1e-3
"""Of sums of probabilities and of log-probs that are computed twice; the server's fp32 leaves 1e-5."""


@dataclass(frozen=True)
class KeepSets:
    """What truncated sampling chose from at each sampled token."""

    ids: NDArray[np.int32]
    """[M, K] likeliest first, -1 where a set is smaller; K is the largest set, at least 1."""
    logp: NDArray[np.float32]
    """[M] log mu of the sampled token among them."""
    mass: NDArray[np.float32]
    """[M] their probability before truncation, Z."""
    candidates: Candidates | None
    """[M, K] the likeliest of them, where `Sampling.candidates` asks for some."""


def keep_sets(
    meta: Mapping[str, Any], sampled: NDArray[np.int64], whole_logp: NDArray[np.float32], sampling: Sampling, vocab_size: int
) -> KeepSets:
    """The keep-sets of a reply, checked.

    Args:
        sampled: [M] ids.
        whole_logp: [M] log-prob of each over the whole vocabulary.

    Raises:
        ValueError: they are missing, malformed or contradict the log-probs, or one is larger than `sampling.keep_sets`.
    """
    if not sampled.size:  # aborted while it was queued: there is no array to read
        ids = np.empty((0, 1), dtype=np.int32)
        none = np.empty(0, dtype=np.float32)
        return KeepSets(ids, none, none, Candidates(ids, np.empty((0, 1), dtype=np.float32)) if sampling.candidates else None)
    masks, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if masks is None or values is None:
        raise ValueError("no output_token_sampling_mask in the reply; return_sampling_mask was asked for: does a router drop it?")
    if len(masks) != sampled.size or len(values) != sampled.size:
        raise ValueError(f"{len(masks)} keep-sets with {len(values)} log-probs for {sampled.size} tokens")
    ids = _rows(masks, -1, np.int32)
    if (ids >= 0).sum() != sum(map(len, masks)):
        raise ValueError("a keep-set holds a negative token")
    _check_ids(ids, vocab_size, "keep-set")
    _check_complete((ids >= 0).sum(-1), sampling, vocab_size)
    chosen = ids == sampled[:, None]
    _require(chosen.any(-1), "token {} was sampled from outside its keep-set")
    candidates = None
    if sampling.candidates:
        logp_MK = _rows(values, -np.inf, np.float32)
        if logp_MK.shape != ids.shape or (np.isfinite(logp_MK) != (ids >= 0)).any() or (np.diff(np.exp(logp_MK)) > 0).any():
            raise ValueError("output_token_sampling_logprobs are not one descending number for each token of output_token_sampling_mask")
        _require(abs(np.exp(logp_MK).sum(-1) - 1) < TOLERANCE, "the log-probs of token {}'s keep-set are not those of all that was kept")
        logp = logp_MK[np.arange(len(ids)), chosen.argmax(-1)]
        candidates = Candidates(ids[:, : sampling.candidates].copy(), logp_MK[:, : sampling.candidates].copy())
    else:
        logp = np.asarray([np.nan if value is None else value for value in values], dtype=np.float32)
        _require(np.isfinite(logp) & (logp < TOLERANCE), "the sampling log-prob of token {} is none: the weights may hold NaN")
    mass = np.exp(whole_logp - logp)
    _require(
        mass < 1 + TOLERANCE,
        "token {} is less likely among the kept tokens than among all: start the server without SGLANG_RETURN_ORIGINAL_LOGPROB and "
        "--rl-on-policy-target, whose log-probs are not those of its sampler",
    )
    return KeepSets(ids, logp, np.minimum(mass, 1), candidates)


def candidates(
    meta: Mapping[str, Any], sampled: NDArray[np.int64], whole_logp: NDArray[np.float32], sampling: Sampling, vocab_size: int
) -> Candidates:
    """The likeliest tokens of an untruncated reply, checked: [M, K], K the smaller of `sampling.candidates` and the vocabulary.

    A token whose probability is 0 in the server's arithmetic is none: -1 and -inf.

    Raises:
        ValueError: they are missing, malformed, or contradict the sampled tokens' log-probs.
    """
    columns = min(sampling.candidates, vocab_size)
    if not sampled.size:
        return Candidates(np.empty((0, columns), dtype=np.int32), np.empty((0, columns), dtype=np.float32))
    if "output_top_logprobs_idx_flat_b64" not in meta:
        raise ValueError("no output_top_logprobs_idx_flat_b64 in the reply; top_logprobs_num was asked for: does a router drop it?")
    shape = [*meta["output_top_logprobs_shape"], meta["output_top_logprobs_null_prefix"]]
    if shape != [sampled.size, columns, 0]:
        raise ValueError(f"output_top_logprobs: {shape} are its rows, columns and empty rows, expected {[sampled.size, columns, 0]}")
    ids = _array(meta, "idx", "<i4", (sampled.size, columns))
    logp = _array(meta, "val", "<f4", (sampled.size, columns))
    if np.isnan(logp).any() or logp.max() > TOLERANCE or (np.diff(np.exp(logp)) > 0).any():
        raise ValueError("output_top_logprobs are no descending log-probs: the weights may hold NaN")
    _check_ids(ids, vocab_size, "candidate")
    if ids.min() < 0:
        raise ValueError("output_top_logprobs name a negative token")
    mass = np.exp(logp).sum(-1)
    _require(mass < 1 + TOLERANCE, "the candidates of token {} have a probability above 1")
    if columns == vocab_size:
        _require(mass > 1 - TOLERANCE, "the candidates of token {} are the whole vocabulary, but their probabilities do not sum to 1")
    listed = ids == sampled[:, None]
    stated = np.where(listed.any(-1), logp[np.arange(len(ids)), listed.argmax(-1)], np.minimum(whole_logp, logp[:, -1]))
    _require(abs(stated - whole_logp) < TOLERANCE, "the log-prob of token {} is not that which its candidates say")
    return Candidates(np.where(np.isneginf(logp), -1, ids).astype(np.int32), logp)


def _rows(lists: list[list[Any]], fill: float, dtype: type[np.generic]) -> NDArray[Any]:
    """[M, K] the lists as rows, `fill` behind the shorter ones."""
    lengths = np.asarray([len(one) for one in lists])
    rows = np.full((len(lists), max(1, lengths.max())), fill, dtype=dtype)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(lists), dtype=dtype, count=lengths.sum())
    return rows


def _array(meta: Mapping[str, Any], kind: str, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
    raw = base64.b64decode(meta[f"output_top_logprobs_{kind}_flat_b64"], validate=True)
    return np.frombuffer(raw, dtype).reshape(shape).astype(dtype[1:])


def _check_ids(ids: NDArray[np.int32], vocab_size: int, what: str) -> None:
    if ids.max() >= vocab_size:
        raise ValueError(f"a {what} holds token {ids.max()}, outside the vocabulary of {vocab_size}")
    ordered = np.sort(ids, axis=-1)
    _require(~((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1), f"the {what}s of token {{}} name one token twice")


def _check_complete(sizes: NDArray[Any], sampling: Sampling, vocab_size: int) -> None:
    """Refuses sets that were cut by the top_k which `Sampling.request` had to add."""
    if sampling.bounded or sampling.keep_sets >= vocab_size or (sizes <= sampling.keep_sets).all():
        return
    at = int(np.argmax(sizes > sampling.keep_sets))
    raise ValueError(
        f"truncated sampling leaves more than rollout.keep_sets = {sampling.keep_sets} tokens to choose token {at} from; set "
        f"rollout.keep_sets to at least {sampling.keep_sets + 1}, probably more, or bound the sets with "
        f"rollout.top_k = {sampling.keep_sets}"
    )


def _require(good: NDArray[np.bool_], message: str) -> None:
    if not good.all():
        raise ValueError(message.format(int(np.argmin(good))))
