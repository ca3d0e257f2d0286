"""Truncated sampling on a real server: its keep-sets against another implementation of top-k, top-p and min-p on transformers'
log-probs, and the tokens it samples against the distribution that the trajectories state.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.types import Trajectory
from tests.engine.oracle import Oracle
from tests.engine.test_rollout import make_prompts

pytestmark = pytest.mark.engine

TEMPERATURE = 0.5
"""At 1 the untrained model is nearly uniform, and nothing but top_k would bind."""
MASS_ERROR, RATIO_ERROR = 2e-6, 1e-5
"""Two fp32 implementations may differ on a token that is this close to a cut-off: in mass before it, in its probability."""

NUCLEUS = Sampling(TEMPERATURE, 40, top_p=0.8, keep_sets=512)
MIXED = Sampling(TEMPERATURE, 40, top_p=0.4, top_k=48, min_p=0.2, keep_sets=48)
OFF: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}


@pytest.fixture(scope="module")
def oracle(tiny_moe: Path) -> Oracle:
    return Oracle(tiny_moe)


def distributions(oracle: Oracle, t: Trajectory) -> NDArray[np.float64]:
    """[M, V] probabilities at each sampled token, before truncation."""
    with torch.no_grad():
        logits = oracle.model(torch.from_numpy(t.tokens.astype(np.int64))[None]).logits[0, :-1]
    return (logits[t.loss_mask[1:]].double() / TEMPERATURE).softmax(-1).numpy()


def kept(probs: NDArray[np.float64], s: Sampling, sign: int) -> NDArray[np.bool_]:
    """[M, V] the definition: fewer than top_k are likelier, what is likelier has at most mass top_p, at least min_p of the likeliest.

    Args:
        sign: 1 keeps what is undecided at a cut-off, -1 does not.
    """
    ordered = -np.sort(-probs, axis=-1)
    before = np.cumsum(ordered, axis=-1) - ordered
    count = (before <= s.top_p + sign * MASS_ERROR).sum(-1, keepdims=True)
    count = count if s.top_k == -1 else np.minimum(count, s.top_k)
    ordered = np.pad(ordered, ((0, 0), (0, 1)))
    last, first_out = (np.take_along_axis(ordered, at, -1) for at in (count - 1, count))
    ranked = probs >= last * (1 - RATIO_ERROR) if sign > 0 else probs > first_out * (1 + RATIO_ERROR)
    return ranked & (probs >= s.min_p * ordered[:, :1] * (1 - sign * RATIO_ERROR))


@pytest.mark.parametrize("sampling", [NUCLEUS, MIXED, Sampling(TEMPERATURE, 40, min_p=0.1, keep_sets=512)], ids=["top_p", "all", "min_p"])
def test_keep_sets_are_those_of_the_definition(engine: Fleet, oracle: Oracle, sampling: Sampling) -> None:
    """1,000 tokens and more; every set holds what is certainly kept, nothing that certainly is not, and few tokens are neither."""
    found = collect(engine, make_prompts(6), samples=5, sampling=sampling, routes=False, version=0)
    asked = {name for name, off in OFF.items() if getattr(sampling, name) != off}
    cuts: set[str] = set()
    tokens, undecided = 0, 0
    sizes: list[int] = []
    for t in found:
        assert t.keep_ids is not None and t.kept_mass is not None
        rows = t.loss_mask
        probs = distributions(oracle, t)
        narrow, wide = kept(probs, sampling, -1), kept(probs, sampling, 1)
        stated = np.zeros((len(probs), probs.shape[1] + 1), dtype=bool)  # padding, -1, falls into the last column
        np.put_along_axis(stated, t.keep_ids[rows], True, axis=-1)
        stated = stated[:, :-1]
        assert (stated | ~narrow).all() and (wide | ~stated).all()
        assert stated[np.arange(len(probs)), t.tokens[rows]].all()
        undecided += int((narrow != wide).sum())
        cuts |= {name for name in asked if (kept(probs, replace(sampling, **{name: OFF[name]}), 1) != wide).any()}
        mass = np.where(stated, probs, 0).sum(-1)
        sampled = probs[np.arange(len(probs)), t.tokens[rows]]
        np.testing.assert_allclose(t.kept_mass[rows], mass, atol=2e-5)
        np.testing.assert_allclose(t.behaviour_logp[rows], np.log(sampled / mass), atol=1e-4)
        tokens += len(probs)
        sizes.extend(stated.sum(-1).tolist())
    print(f"{tokens} tokens, sets of {min(sizes)} to {max(sizes)}, {np.mean(sizes):.1f} on average, {undecided} undecided")
    assert tokens >= 1000
    assert undecided < 0.05 * tokens, "cut-offs that decide nothing show nothing"
    assert min(sizes) < max(sizes) < 512
    assert cuts == asked, "each of the three must be what cuts somewhere"


def test_frequencies_are_those_of_the_corrected_distribution(engine: Fleet) -> None:
    """The first token of one prompt, 600 times. Chi-square of n - 1 degrees of freedom has standard deviation sqrt(2 (n - 1)): five
    of them above the mean happen once in 10^5 runs or less. The uncorrected distribution expects 600 (1 - Z) tokens outside the set.

    The mean importance ratio of an unmoved policy, pi(a) / mu(a), is 1 by definition; against the whole distribution it is Z.
    """
    sampling = replace(MIXED, max_new_tokens=1, candidates=512)
    found = collect(engine, make_prompts(1, seed=5), samples=600, sampling=sampling, routes=False, version=0)
    first = found[0]
    assert first.candidates is not None and first.keep_ids is not None and first.kept_mass is not None
    ids, mu, mass = first.keep_ids[-1], np.exp(first.candidates.logp[-1]), float(first.kept_mass[-1])
    np.testing.assert_array_equal(ids, first.candidates.ids[-1])
    counts = np.array([sum(t.tokens[-1] == token for t in found) for token in ids] + [0])
    assert counts.sum() == len(found)

    def chi_square(counts: NDArray[np.int64], probs: NDArray[np.float32]) -> float:
        return float(((counts - len(found) * probs) ** 2 / (len(found) * probs)).sum())

    bound = (len(ids) - 1) + 5 * (2 * (len(ids) - 1)) ** 0.5
    corrected, raw = chi_square(counts[:-1], mu), chi_square(counts, np.append(mu * mass, 1 - mass))
    print(f"{len(ids)} tokens kept, mass {mass:.3f}, chi-square {corrected:.0f}, bound {bound:.0f}, uncorrected {raw:.0f}")
    assert corrected < bound < raw

    stated = np.array([t.behaviour_logp[-1] for t in found])
    whole = stated + np.log([t.kept_mass[-1] for t in found if t.kept_mass is not None])
    assert 0.1 < mass < 0.9
    assert np.exp(whole - stated).mean() == pytest.approx(mass, abs=1e-4)
    truth = dict(zip(ids.tolist(), mu, strict=True))
    assert np.mean([truth[int(t.tokens[-1])] / np.exp(t.behaviour_logp[-1]) for t in found]) == pytest.approx(1, abs=1e-4)


def test_candidates_agree_with_transformers(engine: Fleet, oracle: Oracle) -> None:
    """The whole vocabulary and the first 20 of it, each within 1e-4 of another implementation; of each group's ids the order may differ
    only where probabilities are equal to that precision."""
    for count in (20, 512):
        sampling = Sampling(TEMPERATURE, 8, candidates=count)
        for t in collect(engine, make_prompts(3), samples=2, sampling=sampling, routes=True, version=0):
            assert t.candidates is not None and t.keep_ids is None and t.kept_mass is None
            ids, logp = t.candidates.ids[t.loss_mask], t.candidates.logp[t.loss_mask]
            assert ids.shape == (t.response_tokens, count) and (t.candidates.ids[~t.loss_mask] == -1).all()
            expected = np.log(distributions(oracle, t))
            np.testing.assert_allclose(logp, np.take_along_axis(expected, ids.astype(np.int64), -1), atol=1e-4)
            np.testing.assert_allclose(logp, -np.sort(-expected, axis=-1)[:, :count], atol=1e-4)


def test_a_bound_that_is_too_small(engine: Fleet) -> None:
    """Top-p keeps hundreds of tokens of an untrained model."""
    narrow = replace(NUCLEUS, keep_sets=8)
    with pytest.raises(EngineError, match=r"more than rollout.keep_sets = 8 tokens .* rollout.keep_sets to at least 9"):
        collect(engine, make_prompts(1), samples=1, sampling=narrow, routes=False, version=0)


def test_an_aborted_answer_keeps_its_sets(engine: Fleet) -> None:
    """Pausing in mode abort cuts answers off: what was sampled comes back with sets and candidates, like any other answer."""
    sampling = replace(MIXED, max_new_tokens=400, candidates=4)
    with Fleet.connect(engine.urls, engine.config, engine.model, routes=False) as fleet, ThreadPoolExecutor(1) as thread:
        answers = thread.submit(collect, fleet, make_prompts(4), samples=2, sampling=sampling, routes=False, version=0, keep_aborted=True)
        while not answers.done():
            time.sleep(0.5)  # 400 tokens take longer; a request that reaches the server late is cut off in the next round
            engine.command("/pause_generation", [{"mode": "abort"}], timeout=20).result()
            engine.command("/continue_generation", [{}], timeout=20).result()
        found = answers.result(60)
    assert [t.finish_reason for t in found].count("abort") >= 4
    assert sum(t.response_tokens for t in found) > 0
    for t in found:
        assert t.keep_ids is not None and t.candidates is not None
        assert ((t.keep_ids >= 0).any(-1) == t.loss_mask).all()
        assert (np.isfinite(t.behaviour_logp) == t.loss_mask).all()
        assert (t.candidates.ids[:, 0] == t.keep_ids[:, 0]).all()
