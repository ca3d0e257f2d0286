"""Keep-sets and candidates: what is asked of the server, the division by Z, and every reply that contradicts itself.

The distribution of all tests has five tokens with probabilities 0.4, 0.3, 0.15, 0.1 and 0.05, likeliest 22 and then 20, 24, 21, 23.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.config import ModelFacts, RolloutConfig
from megatron_rl.rollout.checks import TESTED_VERSION, Served, check_served
from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.ingest import Expected, trajectory
from megatron_rl.rollout.launcher import ServerSpec, server_arguments
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Prompt, Trajectory

PROMPT = Prompt("p7", np.array([10, 11, 12], dtype=np.int32), "", "")
IDS = [22, 20, 24, 21, 23]
PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
VOCAB = 50
NUCLEUS = Sampling(top_p=0.8, keep_sets=4)
"""Keeps 22, 20 and 24: 0.7 does not reach 0.8, 0.85 does. Z = 0.85."""


def reply(sampled: list[int], **meta: Any) -> dict[str, Any]:
    """As the server answers, with log-probs of the whole distribution."""
    logp = [[float(np.log(PROBS[IDS.index(token)])), token, None] for token in sampled]
    return {
        "text": "",
        "output_ids": sampled,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(sampled)},
            "prompt_tokens": 3,
            "output_token_logprobs": logp,
            "weight_versions": [{"version": "0", "start": 0, "end": len(sampled)}],
            **meta,
        },
    }


def truncated(sampled: list[int], sizes: list[int], *, support: bool = False) -> dict[str, Any]:
    """Token n sampled from the `sizes[n]` likeliest."""
    masks = [IDS[:size] for size in sizes]
    log_probs = [np.log(PROBS[:size] / PROBS[:size].sum()).tolist() for size in sizes]
    selected = [row[mask.index(token)] for row, mask, token in zip(log_probs, masks, sampled, strict=True)]
    return reply(sampled, output_token_sampling_mask=masks, output_token_sampling_logprobs=log_probs if support else selected)


def flat(ids: list[list[int]], logp: Any) -> dict[str, Any]:
    return {
        "output_top_logprobs_idx_flat_b64": base64.b64encode(np.array(ids, dtype="<i4").tobytes()).decode(),
        "output_top_logprobs_val_flat_b64": base64.b64encode(np.array(logp, dtype="<f4").tobytes()).decode(),
        "output_top_logprobs_shape": list(np.shape(ids)),
        "output_top_logprobs_null_prefix": 0,
    }


def ingest(answer: dict[str, Any], sampling: Sampling, vocab_size: int = VOCAB, *, keep_aborted: bool = False) -> Trajectory:
    return trajectory(answer, PROMPT, "g", "g.0", "http://h:1", Expected(vocab_size, None, 0, keep_aborted, sampling))


def test_behaviour_is_of_the_kept_tokens() -> None:
    """Z is 0.85, then 0.4 where 22 alone was kept: 0.3 / 0.85 and 0.4 / 0.4."""
    t = ingest(truncated([20, 22], [3, 1]), NUCLEUS)
    assert t.keep_ids is not None and t.kept_mass is not None
    assert t.keep_ids.tolist() == [[-1] * 3] * 3 + [[22, 20, 24], [22, -1, -1]]
    np.testing.assert_allclose(t.behaviour_logp, [np.nan] * 3 + [np.log(0.3 / 0.85), 0], atol=1e-6)
    np.testing.assert_allclose(t.kept_mass, [np.nan] * 3 + [0.85, 0.4], atol=1e-6)
    assert t.candidates is None
    assert [x.dtype.name for x in (t.keep_ids, t.kept_mass, t.behaviour_logp)] == ["int32", "float32", "float32"]


def test_mean_ratio_without_the_correction_is_the_kept_mass() -> None:
    """By enumeration of what the nucleus can sample: sum of mu(a) pi(a) / mu(a) is Z with pi of all tokens, 1 with pi of the kept."""
    t = ingest(truncated(IDS[:3], [3, 3, 3]), NUCLEUS)
    mu, pi = np.exp(t.behaviour_logp[3:]), PROBS[:3]
    assert (mu * (pi / mu)).sum() == pytest.approx(0.85, abs=1e-6)
    assert mu.sum() == pytest.approx(1, abs=1e-6)
    assert t.kept_mass is not None and t.kept_mass[3:].tolist() == pytest.approx([0.85] * 3, abs=1e-6)


def test_candidates_of_a_truncated_policy_are_among_the_kept() -> None:
    """Two of three, and where one token was kept there is no second."""
    t = ingest(truncated([24, 22], [3, 1], support=True), replace(NUCLEUS, candidates=2))
    plain = ingest(truncated([24, 22], [3, 1]), NUCLEUS)
    np.testing.assert_allclose(t.behaviour_logp, plain.behaviour_logp, atol=1e-6)
    assert t.candidates is not None and t.keep_ids is not None
    assert t.candidates.ids.tolist() == [[-1, -1]] * 3 + [[22, 20], [22, -1]]
    np.testing.assert_allclose(
        t.candidates.logp, [[-np.inf] * 2] * 3 + [np.log([0.4 / 0.85, 0.3 / 0.85]).tolist(), [0, -np.inf]], atol=1e-6
    )
    assert t.keep_ids.shape == (5, 3)


def test_tied_tokens_may_exceed_a_top_k_that_was_asked_for() -> None:
    """flashinfer keeps all tokens tied at the cut-off: the set is whole."""
    t = ingest(truncated([22], [4]), Sampling(top_k=3, keep_sets=3))
    assert t.keep_ids is not None and t.keep_ids.shape == (4, 4)


def test_a_set_the_added_top_k_may_have_cut() -> None:
    """Up to 4 tokens are whole, 5 may be the first of more; in a vocabulary of 4 nothing can be cut."""
    assert ingest(truncated([22], [4]), NUCLEUS).keep_ids is not None
    message = (
        r"leaves more than rollout.keep_sets = 4 tokens to choose token 1 from; set rollout.keep_sets to at least 5.*rollout.top_k = 4"
    )
    with pytest.raises(EngineError, match=message):
        ingest(truncated([22, 22], [4, 5]), NUCLEUS)


@pytest.mark.parametrize("aborted", [True, False])
def test_partial_answers_have_what_was_sampled(aborted: bool) -> None:
    """An abort keeps finished tokens; one from the queue has none, nor any array to read them from."""
    partial = truncated([20], [3], support=True) if aborted else reply([])
    partial["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
    t = ingest(partial, replace(NUCLEUS, candidates=2), keep_aborted=True)
    assert t.keep_ids is not None and t.kept_mass is not None and t.candidates is not None
    assert t.response_tokens == int(aborted)
    assert (t.keep_ids[:3] == -1).all() and len(t.keep_ids) == len(t.kept_mass) == len(t.candidates.logp) == 3 + aborted
    plain = reply([20], **flat([[22, 20]], np.log(PROBS[None, :2]))) if aborted else reply([])
    plain["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
    found = ingest(plain, Sampling(candidates=2), keep_aborted=True).candidates
    assert found is not None and found.ids.shape == found.logp.shape == (3 + aborted, 2)


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: answer["meta_info"].pop("output_token_sampling_mask"), "return_sampling_mask was asked for"),
        (_set(output_token_sampling_mask=[[22, 20, 24]]), "1 keep-sets with 2 log-probs for 2 tokens"),
        (_set(output_token_sampling_mask=[[22, 20], [22, 50]]), "token 50, outside the vocabulary of 50"),
        (_set(output_token_sampling_mask=[[22, 20], [22, -1]]), "holds a negative token"),
        (_set(output_token_sampling_mask=[[22, 20], [22, 22]]), "keep-sets of token 1 name one token twice"),
        (_set(output_token_sampling_mask=[[22, 24], [22]]), "token 0 was sampled from outside its keep-set"),
        (_set(output_token_sampling_mask=[[20], []]), "token 1 was sampled from outside its keep-set"),
        (_set(output_token_sampling_logprobs=[-0.5, None]), "sampling log-prob of token 1 is none"),
        (_set(output_token_sampling_logprobs=[-0.5, 0.1]), "sampling log-prob of token 1 is none"),
        (_set(output_token_sampling_logprobs=[-1.3, 0.0]), "token 0 is less likely among the kept .* SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
)
def test_refused_keep_sets(change: Callable[[dict[str, Any]], None], message: str) -> None:
    answer = truncated([20, 22], [3, 1])
    change(answer)
    with pytest.raises(EngineError, match=message) as caught:
        ingest(answer, NUCLEUS)
    assert str(caught.value).startswith("http://h:1: request g.0 (prompt p7): ")


@pytest.mark.parametrize(
    ("log_probs", "message"),
    [
        ([np.log([0.5, 0.3]).tolist(), [0.0]], "not one descending number"),
        ([np.log([0.3, 0.7]).tolist(), [0.0]], "not one descending number"),
        ([np.log([0.5, 0.4, 0.2]).tolist(), [0.0]], "token 0's keep-set are not those of all that was kept"),
    ],
)
def test_refused_support(log_probs: list[list[float]], message: str) -> None:
    answer = truncated([20, 22], [3, 1], support=True)
    answer["meta_info"]["output_token_sampling_logprobs"] = log_probs
    with pytest.raises(EngineError, match=message):
        ingest(answer, replace(NUCLEUS, candidates=1))


def test_candidates_of_the_whole_policy() -> None:
    """One sampled token among them, one not; a token without probability is no candidate."""
    logp = np.log([[0.4, 0.3, 0.15], [0.4, 0.3, 0.15]])
    logp[1, 2] = -np.inf
    answer = reply([24, 20], **flat([[22, 20, 24], [22, 20, 21]], logp))
    t = ingest(answer, Sampling(candidates=3))
    assert t.candidates is not None and t.keep_ids is None and t.kept_mass is None
    assert t.candidates.ids.tolist() == [[-1] * 3] * 3 + [[22, 20, 24], [22, 20, -1]]
    np.testing.assert_allclose(t.candidates.logp[3:], logp, atol=1e-6)
    assert np.isneginf(t.candidates.logp[:3]).all()
    assert [x.dtype.name for x in (t.candidates.ids, t.candidates.logp)] == ["int32", "float32"]
    np.testing.assert_allclose(t.behaviour_logp[3:], np.log([0.15, 0.3]), atol=1e-6)


def test_more_candidates_than_tokens_are_the_whole_distribution() -> None:
    """Tokens renamed to 0..4 of a vocabulary of five; 0.05 missing is then an error."""
    answer = reply([], **flat([[2, 0, 4, 1, 3]], np.log(PROBS[None])))
    answer |= {"output_ids": [0]}
    answer["meta_info"] |= {"output_token_logprobs": [[float(np.log(0.3)), 0, None]]}
    answer["meta_info"]["weight_versions"] = [{"version": "0", "start": 0, "end": 1}]
    whole = Sampling(candidates=64)
    t = trajectory(answer, PROMPT, "g", "g.0", "u", Expected(5, None, 0, False, whole))
    assert t.candidates is not None and t.candidates.ids.shape == (4, 5)
    answer["meta_info"] |= flat([[2, 0, 4, 1, 3]], np.log([[0.4, 0.3, 0.15, 0.1, 0.01]]))
    with pytest.raises(EngineError, match="whole vocabulary, but their probabilities do not sum to 1"):
        trajectory(answer, PROMPT, "g", "g.0", "u", Expected(5, None, 0, False, whole))


GOOD = np.log([[0.4, 0.3], [0.4, 0.3]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "top_logprobs_num was asked for"),
        (flat([[22, 20]], GOOD[:1]), r"\[1, 2, 0\] are its rows, columns and empty rows, expected \[2, 2, 0\]"),
        (flat([[22, 20], [22, 20]], GOOD[:1]), "cannot reshape"),
        (flat([[22, 20], [22, 50]], GOOD), "token 50, outside the vocabulary of 50"),
        (flat([[22, 20], [22, -1]], GOOD), "negative token"),
        (flat([[22, 20], [22, 22]], GOOD), "candidates of token 1 name one token twice"),
        (flat([[22, 20], [22, 20]], GOOD[:, ::-1]), "no descending log-probs"),
        (flat([[22, 20], [22, 20]], [[np.nan, -1], [-1, -1]]), "no descending log-probs"),
        (flat([[22, 20], [22, 20]], np.log([[0.4, 0.3], [0.9, 0.3]])), "candidates of token 1 have a probability above 1"),
        (flat([[22, 20], [22, 20]], np.log([[0.4, 0.2], [0.4, 0.3]])), "log-prob of token 0 is not that which its candidates say"),
        (flat([[22, 24], [22, 24]], np.log([[0.4, 0.15], [0.4, 0.15]])), "log-prob of token 0 is not that which its candidates say"),
    ],
)
def test_refused_candidates(fields: dict[str, Any], message: str) -> None:
    """The last: a token likelier than the second is not listed."""
    with pytest.raises(EngineError, match=message):
        ingest(reply([20, 22], **copy.deepcopy(fields)), Sampling(candidates=2))


def test_untruncated_requests_ask_for_nothing_more() -> None:
    body = Sampling(0.7, 9, (5,)).request(VOCAB)
    parameters = {"temperature": 0.7, "max_new_tokens": 9, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [5]}
    assert body == {"sampling_params": parameters, "return_logprob": True}


@pytest.mark.parametrize(
    ("sampling", "top_k"),
    [
        (Sampling(top_k=8, keep_sets=8), 8),
        (Sampling(top_k=8, top_p=0.9, keep_sets=10), 8),
        (Sampling(top_p=0.9, keep_sets=10), 11),
        (Sampling(min_p=0.1, top_k=20, keep_sets=10), 11),
        (Sampling(min_p=0.1, keep_sets=64), VOCAB),
        (Sampling(min_p=0.1, keep_sets=64, candidates=3), VOCAB),
    ],
)
def test_truncated_requests_bound_the_sets(sampling: Sampling, top_k: int) -> None:
    """SGLang wants a finite top_k: the one asked for, or one that shows by being reached that it cut."""
    body = sampling.request(VOCAB)
    assert body["sampling_params"]["top_k"] == top_k
    assert body["return_sampling_mask"] and "top_logprobs_num" not in body
    assert body["sampling_logprobs_mode"] == ("support" if sampling.candidates else "selected")


def test_candidates_never_exceed_the_vocabulary() -> None:
    """torch.topk would end the server."""
    assert Sampling(candidates=20).request(VOCAB)["top_logprobs_num"] == 20
    assert Sampling(candidates=51).request(VOCAB)["top_logprobs_num"] == VOCAB


def test_greedy_is_not_truncated() -> None:
    body = replace(NUCLEUS, temperature=0.0).request(VOCAB)
    assert body["sampling_params"]["top_k"] == -1 and "return_sampling_mask" not in body


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}])
def test_truncation_without_keep_sets(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep_sets: 0 must be positive where .* set it to top_k, or to the most tokens"):
        Sampling(**fields)


def test_one_token_is_no_policy() -> None:
    with pytest.raises(ValueError, match=r"top_k: 1 leaves one token.*temperature to 0"):
        Sampling(top_k=1, keep_sets=1)


def test_from_config() -> None:
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=32, min_p=0.01, keep_sets=40, max_new_tokens=5)
    assert Sampling.from_config(config, candidates=3) == Sampling(0.7, 5, (), 0.9, 32, 0.01, 40, 3)


def test_server_returns_sets_of_that_size() -> None:
    """Twice as many as wanted leaves room for ties; without truncation the server's default stays."""
    spec = ServerSpec("/m", routes=False, context_length=64)
    arguments = server_arguments(RolloutConfig(top_p=0.9, keep_sets=512), spec, 0, 1000, cuda=True)
    assert arguments[arguments.index("--sampling-mask-max-tokens") + 1] == "1024"
    assert "--sampling-mask-max-tokens" not in server_arguments(RolloutConfig(), spec, 0, 1000, cuda=True)


@pytest.mark.parametrize(("limit", "good"), [(511, False), (512, False), (513, True)])
def test_servers_limit(limit: int, good: bool) -> None:
    """keep_sets 512 asks for 513, to tell a whole set of 512 from a cut one."""
    facts = ModelFacts("Qwen3ForCausalLM", layers=2, heads=2, kv_heads=1, experts=0, vocab_size=VOCAB, max_positions=64)
    server = {"version": TESTED_VERSION, "dtype": "float32", "sampling_mask_max_tokens": limit}
    served = Served("http://h:1", server, {"architectures": [facts.architecture]}, facts.vocab_size)
    check_served(served, facts, None, dtype="float32", routes=False)
    if good:
        check_served(served, facts, None, dtype="float32", routes=False, keep_sets=512)
    else:
        with pytest.raises(ValueError, match=f"keep-sets of {limit} tokens at most.*--sampling-mask-max-tokens 1024"):
            check_served(served, facts, None, dtype="float32", routes=False, keep_sets=512)
