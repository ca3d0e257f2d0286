"""The laboratory's numbers on data whose answer is known."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.lab.acceptance import effective_share, table
from megatron_rl.lab.attribution import ORDERS, attribute, by_layer, by_margin, explain, shares
from megatron_rl.lab.probability import law, limits
from megatron_rl.lab.records import Condition, EngineSetting, Rescored, Sampled, TokenBatch
from megatron_rl.lab.sequence import bounds_by_horizon, certificate, drift, length_table
from megatron_rl.lab.summary import statistics, summarise
from tests.unit.lab_cases import LAYERS, made_up_measurement


def sampled(mu: list[list[float]], d: list[list[float]], rewards: list[float], **extra: Any) -> Sampled:
    """Answers without prompts (a first token apart), scored live with log-ratio d."""
    sizes = [len(x) for x in mu]
    mu_T = np.concatenate([np.array(x, dtype=np.float32) for x in mu])
    n = len(mu_T)
    reward = np.array(rewards, dtype=np.float32)
    batch = TokenBatch(
        label_T=np.zeros(n, np.int32),
        mask_T=np.ones(n, dtype=bool),
        offsets_S=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        first_S=np.zeros(len(sizes), np.int32),
        turn_T=np.zeros(n, np.int32),
        mu_T=mu_T,
        version_T=np.zeros(n, np.int32),
        reward_S=reward,
        advantage_S=reward - reward.mean(),
        group_S=np.zeros(len(sizes), np.int32),
    )
    logp = (mu_T + np.concatenate([np.array(x) for x in d])).astype(np.float32)
    live = Rescored(Condition("live", "none", "fp32", "one process"), logp, **extra)
    return Sampled(EngineSetting("engine", "fp32"), batch, {"live": live})


# -- attribution -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_parts_add_up_to_the_log_ratio(order: Any) -> None:
    sample = made_up_measurement().main
    for name in sample.rescored:
        found = attribute(sample, name, order)
        assert found is not None
        np.testing.assert_allclose(sum(found.parts.values()), found.d_M, atol=1e-6, rtol=0)
        values = shares(found)
        for key in ("variance_share", "tail_share"):
            assert sum(values[key].values()) == pytest.approx(1.0, abs=1e-9)


def test_a_condition_without_its_re_scorings_is_not_attributed() -> None:
    sample = made_up_measurement().main
    alone = dataclasses.replace(sample, rescored={"live": sample.rescored["live"]})
    assert explain(alone, "live") is None


def test_by_layer_finds_what_each_layer_adds() -> None:
    """In the made-up batch the layers' contributions are independent, so shares removed alone add up to those removed together."""
    rows = by_layer(made_up_measurement(trajectories=200).main, "live")
    assert [r["layer"] for r in rows] == list(range(LAYERS))
    assert rows[-1]["removed_up_to"] == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(np.cumsum([r["removed_alone"] for r in rows]), [r["removed_up_to"] for r in rows], atol=1e-5)
    assert all(r["margin_at_flips"] < 0.03 < r["margin_elsewhere"] for r in rows), "flips were put where the margin is below 0.03"


def test_by_margin_finds_flips_where_margins_are_small() -> None:
    rows = by_margin(made_up_measurement().main, "live")
    assert rows[0]["flip_share"] > 0.9 and rows[-1]["flip_share"] == 0.0
    assert rows[0]["mean_abs_routing"] > 0 and rows[-1]["mean_abs_routing"] < 1e-6


# -- probability -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_law_is_fitted(power: float) -> None:
    """|d| = 0.03 (1 - p)^power exactly gives that slope and factor, up to the width of the bins."""
    p = np.random.default_rng(0).uniform(0.01, 0.999, 20_000)
    found = law(sampled([np.log(p).tolist()], [(0.03 * (1 - p) ** power).tolist()], [0.0]), "live")
    assert found["slope"] == pytest.approx(power, abs=0.02)
    assert found["factor"] == pytest.approx(0.03, rel=0.03)


def test_bounds_hold_where_logits_differ_by_at_most_the_noise_and_not_where_by_more() -> None:
    """Logits with uniform noise in [-e, e]: the three bounds hold at every token with e, and the exact one fails with a tenth of it."""
    rng = np.random.default_rng(1)
    z, e = rng.normal(0, 2, (4000, 20)), 0.3
    q = z + rng.uniform(-e, e, z.shape)
    mu, theta = (x[:, 0] - np.log(np.exp(x).sum(axis=1)) for x in (z, q))
    for noise, holds in ((e, True), (e / 10, False)):
        for name, (low, high) in limits(mu, theta, np.full(len(mu), noise)).items():
            inside = bool(((theta - mu >= low - 1e-12) & (theta - mu <= high + 1e-12)).all())
            assert name == "naive" or inside == holds, (name, noise)
    spread = sampled([mu.tolist()], [(theta - mu).tolist()], [0.0], noise_T=np.full(len(mu), e, np.float32))
    found = law(spread, "live")
    assert [found["bounds"][name]["inside_share"] for name in ("exact", "slope", "smaller")] == [1.0, 1.0, 1.0]
    assert found["needed_noise"]["max"] <= e


# -- sequences ---------------------------------------------------------------------------------------------------------------------


def test_drift_tells_a_random_walk_from_a_drift() -> None:
    rng = np.random.default_rng(2)
    walk = drift(list(rng.normal(0, 0.01, (400, 256))))
    steady = drift(list(np.full((50, 256), -0.01)))
    assert walk["exponent"] == pytest.approx(0.5, abs=0.05)
    assert steady["exponent"] == pytest.approx(1.0, abs=1e-9)
    assert abs(walk["autocorrelation"]) < 0.02
    assert steady["mean_per_token"] == pytest.approx(-0.01)


def test_the_length_table_holds_every_sequence_once() -> None:
    sample = made_up_measurement().main
    rows = length_table(sample, "live")
    assert sum(r["sequences"] for r in rows) == sample.batch.trajectories
    assert all(a["length_to"] <= b["length_from"] for a, b in pairwise(rows))


def test_a_certificate_needs_a_surrogate_above_the_least_bound() -> None:
    """One token each, R = 1 where theta doubles the token, 0 where it drops it: L' = (1 + 0) / 2, and T = 1 makes every bound 0
    (classical 2 T (T - 1) e^2; a context cannot have shifted before the first token). Longer sequences have bounds above it."""
    mu = math.log(0.4)
    one = certificate(sampled([[mu], [mu]], [[math.log(2)], [-1.0]], [1.0, 0.0]), "live")
    assert one["surrogate"] == pytest.approx(0.5, abs=1e-6)
    assert one["bounds"]["classical"] == 0.0 and one["best_value"] == 0.0 and one["certified"]
    longer = certificate(sampled([[mu] * 8, [mu] * 8], [[0.3] * 8, [-0.3] * 8], [0.5, 0.5]), "live")
    assert not longer["certified"] and longer["best_value"] > 0
    assert certificate(sampled([[mu]], [[0.1]], [-1.0]), "live")["surrogate"] is None, "the bounds are for rewards in [0, 1]"


def test_bounds_grow_with_the_horizon() -> None:
    rows = bounds_by_horizon(list(np.random.default_rng(3).normal(0, 0.05, (30, 64))))
    assert rows[0]["horizon"] == 1 and rows[-1]["horizon"] == 64
    assert all(a["coupling"] <= b["coupling"] for a, b in pairwise(rows))


# -- methods -----------------------------------------------------------------------------------------------------------------------


def rows_by_method(sample: Sampled, *, stale: bool) -> dict[str, dict[str, Any]]:
    """All of d is staleness inside the step (old is mu), or all of it is the engine's gap (old is theta)."""
    live = sample.rescored["live"]
    return {row["method"]: row for row in table(sample, live, dataclasses.replace(live, logp_T=sample.batch.mu_T) if stale else live)}


def test_methods_keep_what_their_papers_say() -> None:
    """Four answers of one token each, ratios 1, 1, 6 and 1, and the large one wants to grow further (A > 0).

    As staleness: PPO's clip takes its gradient. As engine gap: TIS (cap 2) keeps it at 2, IcePop (0.5 to 5) drops it.
    """
    mu = math.log(0.1)
    sample = sampled([[mu]] * 4, [[0.0], [0.0], [math.log(6)], [0.0]], [0.0, 0.0, 1.0, 1.0])
    stale, gap = rows_by_method(sample, stale=True), rows_by_method(sample, stale=False)
    assert stale["policy_gradient"]["kept_tokens"] == 1.0
    assert stale["policy_gradient"]["max_weight"] == pytest.approx(6.0, rel=1e-5)
    assert stale["ppo"]["kept_tokens"] == 0.75 and gap["ppo"]["kept_tokens"] == 1.0
    assert gap["tis"]["max_weight"] == pytest.approx(2.0)
    assert gap["tis"]["effective_tokens"] == pytest.approx(25 / 28)  # (1 + 1 + 2 + 1)^2 / (4 (1 + 1 + 4 + 1))
    assert gap["icepop"]["kept_tokens"] == 0.75
    assert gap["rspo"]["missing"] == ["router_shift"]


def test_a_sequence_mask_drops_all_tokens_of_a_sequence() -> None:
    """One token 12 nats off: veto takes its answer, and nothing of the other two."""
    mu = math.log(0.1)
    sample = sampled([[mu] * 2] * 3, [[0.0, -12.0], [0.0, 0.0], [0.0, 0.0]], [0.0, 1.0, 1.0])
    found = rows_by_method(sample, stale=False)["veto"]
    assert found["kept_tokens"] == pytest.approx(4 / 6) and found["kept_sequences"] == pytest.approx(2 / 3)


def test_nothing_moves_where_the_policies_are_equal() -> None:
    """theta = old = mu: no mask acts and every weight is 1 (all methods agree with the policy gradient there, papers.md 2.9)."""
    mu = math.log(0.3)
    found = rows_by_method(sampled([[mu] * 3] * 4, [[0.0] * 3] * 4, [0.0, 1.0, 0.0, 1.0]), stale=True)
    for name, row in found.items():
        if "missing" not in row and name not in ("vespo", "direct_advantage", "sapo"):
            assert (row["kept_tokens"], row["mean_weight"]) == (1.0, pytest.approx(1.0, abs=1e-6)), name


def test_effective_share() -> None:
    assert effective_share(torch.tensor([1.0, 1.0, 1.0, 1.0])) == 1.0
    assert effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_share(torch.zeros(3)) == 0.0


# -- the summary -------------------------------------------------------------------------------------------------------------------


def test_statistics_of_a_known_ratio() -> None:
    found = statistics(np.array([0.0, 0.2]))
    assert found["mean_k3"] == pytest.approx((math.exp(0.2) - 1 - 0.2) / 2)
    assert found["mean_k1"] == pytest.approx(-0.1) and found["max_abs_d"] == pytest.approx(0.2) and found["share_beyond_0.1"] == 0.5


def test_the_summary_is_json_and_repeats() -> None:
    measurement = made_up_measurement(trajectories=8)
    one, other = (json.dumps(summarise(m), allow_nan=False) for m in (measurement, made_up_measurement(trajectories=8)))
    assert one == other
    found = json.loads(one)["engines"]["bf16"]
    for row in found["conditions"].values():
        assert row["mean_k3"] >= 0 and row["floor"]["mean_k3"] == pytest.approx(2e-5)
        assert set(row["attribution"]["orders"][0]["variance_share"]) == {"routing", "staleness", "numerics"}
    assert found["conditions"]["live"]["route_mismatch_share"] > 0 == found["conditions"]["R3"]["route_mismatch_share"]
    assert list(found["trained"]) == ["live, lag 2", "R2, lag 2", "R3, lag 2"]
