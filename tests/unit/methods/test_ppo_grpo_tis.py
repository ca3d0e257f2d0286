"""The everyday methods against golden values from the tests of other frameworks (peers.md E), each with the arithmetic that gives it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.methods.objective import Denominators, reduce_loss
from megatron_rl.methods.segments import LocalSegments

from .packs import Outcome, evaluate, make, stack


def weights(name: str, params: dict, sequences: list[tuple[list[float], list[float]]], masks: list[list[bool]] | None = None) -> Outcome:
    """A correction's weight x mask as -gradient of a token-sum REINFORCE loss with A = 1; sequences are (old, mu) log-probs."""
    batch = []
    for i, (old, mu) in enumerate(sequences):
        t = torch.tensor(old, dtype=torch.float64)
        more = {} if masks is None else {"mask": torch.tensor(masks[i])}
        batch.append(make(t, t, torch.tensor(mu, dtype=torch.float64), **more))
    return evaluate(stack("policy_gradient", {"weight": "none"}, [(name, params)], "seq-mean-token-sum"), batch)


def values(outcome: Outcome) -> list[list[float]]:
    return [(-g * len(outcome.grads)).tolist() for g in outcome.grads]


def approx(expected: list[list[float]], digits: float = 1e-4) -> list[object]:
    return [pytest.approx(row, abs=digits) for row in expected]


OLD, ROLLOUT = [-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5]


def test_skyrl_token_cap() -> None:
    """exp(0.5), exp(-0.5), min(exp(1), 2); one of three capped."""
    outcome = weights("tis", {}, [(OLD, ROLLOUT)])
    assert values(outcome) == approx([[1.6487, 0.6065, 2.0]])
    assert outcome.metrics["tis/capped_share"] == pytest.approx(1 / 3)


def test_skyrl_sequence_weight() -> None:
    """exp(0.5 - 0.5 + 1) = e, with the middle token masked exp(0.5 + 1)."""
    params = {"level": "sequence", "cap": 100.0}
    assert values(weights("tis", params, [(OLD, ROLLOUT)])) == approx([[2.7183] * 3])
    masked = values(weights("tis", params, [(OLD, ROLLOUT)], [[True, False, True]]))
    assert masked == approx([[math.exp(1.5), 0.0, math.exp(1.5)]])


def test_skyrl_sequence_cap() -> None:
    """exp(3) capped at 5."""
    assert values(weights("tis", {"level": "sequence", "cap": 5.0}, [([-1.0] * 3, [-2.0] * 3)])) == approx([[5.0] * 3])


def test_skyrl_geometric_mask_and_outlier() -> None:
    """A geometric mean of e^0.5 is outside [0.99, 1.01]; one token at e^5 > 100 drops its whole sequence and no other."""
    assert values(weights("geo_rs", {"low": 0.99, "high": 1.01}, [([-1.0] * 2, [-1.5] * 2), ([-1.0], [-1.0])])) == approx([[0, 0], [1]])
    outlier = weights("veto", {"high": 100.0}, [([-1.0, -1.0], [-1.0, -6.0]), ([-1.0], [-1.0])])
    assert values(outlier) == approx([[0, 0], [1]])


def test_verl_mask_mode() -> None:
    """old -2 against -1 and -2.5: ratios 0.368 and 1.649, of which [0.5, 2] keeps the second; half is masked."""
    outcome = weights("mis", {"level": "token", "low": 0.5}, [([-2.0, -2.0], [-1.0, -2.5])])
    assert values(outcome) == approx([[0.0, 1.6487]])
    assert outcome.metrics["mis/kept_share"] == 0.5
    assert values(weights("tis", {}, [([-2.0, -2.0], [-1.0, -2.5])])) == approx([[0.3679, 1.6487]])


def test_verl_icepop() -> None:
    """Ratios 0.4, 0.8, 6 in [0.5, 5]: only 0.8 is left."""
    mu = [-2.0, -2.0, -2.0]
    old = [-2 + math.log(x) for x in (0.4, 0.8, 6.0)]
    outcome = weights("icepop", {}, [(old, mu)])
    assert values(outcome) == approx([[0, 0.8, 0]])
    assert outcome.metrics["icepop/kept_share"] == pytest.approx(1 / 3)


def test_verl_ratio_bounds_are_of_the_ratio_not_its_inverse() -> None:
    """verl 0.9.1's token_k1 bounds -log r and, for "0.6_1.4", keeps ratio 1.5 and drops 0.65 (peers.md C 19). Here lo <= ratio <= hi."""
    old = [-2 + math.log(1.5), -2 + math.log(0.65)]
    assert values(weights("mis", {"level": "token", "low": 0.6, "high": 1.4}, [(old, [-2.0, -2.0])])) == approx([[0, 0.65]])


def test_areal_geometric_weight_over_packed_sequences() -> None:
    """Means of [0, 0.5, 1] and [0.6, 0.3, 0]: e^0.5 and e^0.3, not leaking over the boundary."""
    outcome = weights("tis", {"level": "geometric", "cap": 9.0}, [([-2, -1.5, -1], [-2] * 3), ([-1.4, -1.7, -2], [-2] * 3)])  # type: ignore[list-item]
    assert values(outcome) == approx([[math.exp(0.5)] * 3, [math.exp(0.3)] * 3])


def test_trl_sequence_and_geometric_levels_differ() -> None:
    """Sum against mean of 80 log-ratios of -0.00705: 0.569 and 0.993 (TRL #5814)."""
    pair = ([-1.00705] * 80, [-1.0] * 80)
    assert values(weights("tis", {"level": "sequence"}, [pair]))[0][0] == pytest.approx(0.569, abs=5e-4)
    assert values(weights("tis", {"level": "geometric"}, [pair]))[0][0] == pytest.approx(0.993, abs=5e-4)


def ppo_loss(name: str, params: dict, advantage: float, log_ratio: float) -> float:
    x = torch.tensor([-1.0 + log_ratio], dtype=torch.float64)
    old = torch.tensor([-1.0], dtype=torch.float64)
    return evaluate(stack(name, params), [make(x, old, old, advantage)]).loss


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (1.0, 1.5, -1.2),  # clipped above at 1 + 0.2
        (1.0, 0.5, -0.5),  # the minimum is the plain term
        (-1.0, 1.5, 1.5),  # the minimum is the plain term
        (-1.0, 0.5, 0.8),  # clipped below at 1 - 0.2
        (-1.0, 7.0, 3.0),  # dual clip at 3
    ],
)
def test_ppo_values(advantage: float, ratio: float, expected: float) -> None:
    assert ppo_loss("ppo", {}, advantage, math.log(ratio)) == pytest.approx(expected)


def test_grpo_has_no_dual_clip() -> None:
    assert ppo_loss("grpo", {}, -1.0, math.log(7.0)) == pytest.approx(7.0)


def test_asymmetric_bounds() -> None:
    """DAPO: 1.25 is inside 0.28, 1.3 is not."""
    assert ppo_loss("dapo_dynamic", {}, 1.0, math.log(1.25)) == pytest.approx(-1.25)
    assert ppo_loss("dapo_dynamic", {}, 1.0, math.log(1.3)) == pytest.approx(-1.28)


LOSS = [1.0, 2.0, 3.0, 10.0]
SEGMENTS = LocalSegments(torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool), 2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
    ],
)
def test_aggregations(aggregation: str, expected: float) -> None:
    """Sequences [1, 2, 3] and [10], Lmax 8."""
    loss = reduce_loss(torch.tensor(LOSS), SEGMENTS, aggregation, Denominators(4, 2, 8))  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(expected)


def test_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match=r"objective\.aggregation: 'mean'.*token-mean"):
        reduce_loss(torch.tensor(LOSS), SEGMENTS, "mean", Denominators(4, 2, 8))  # type: ignore[arg-type]


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """Statement 19: with equal tokens, the loss is that of the whole batch times the acceptance rate; dividing by the kept ones alone
    would undo it. Three of four sequences pass."""
    good, bad = ([-1.0, -1.0], [-1.0, -1.0]), ([-1.0, -1.0], [-9.0, -1.0])

    def loss(sequences: list[tuple[list[float], list[float]]], corrections: list[tuple[str, dict]]) -> float:
        batch = [make(torch.tensor(o).double(), None, torch.tensor(m).double()) for o, m in sequences]
        return evaluate(stack("ppo", {}, corrections), batch).loss

    whole = loss([good, good, good, bad], [])
    masked = loss([good, good, good, bad], [("veto", {"high": 100.0})])
    assert masked / whole == pytest.approx(3 / 4)
    assert loss([good, good, good], [("veto", {"high": 100.0})]) == pytest.approx(whole)


def test_effective_sample_size_from_the_metrics() -> None:
    """Weights 0, 0.8, 0 have ESS 1/3 of the tokens (verl): mean^2 / mean of squares."""
    old = [-2 + math.log(x) for x in (0.5, 2.0)]
    metrics = weights("tis", {}, [(old, [-2.0, -2.0])]).metrics
    assert metrics["tis/weight_mean"] ** 2 / metrics["tis/weight_square_mean"] == pytest.approx(1.25**2 / 2.125)


def test_corrections_multiply() -> None:
    """tis caps at 1.2, snis at its default divides by the mean of its own weights (1.5): 1.2 * 1."""
    t = torch.tensor([-1.0], dtype=torch.float64)
    s = make(t, t, t - math.log(1.5))
    outcome = evaluate(stack("policy_gradient", {"weight": "none"}, [("tis", {"cap": 1.2}), ("snis", {})]), [s])
    assert -outcome.grads[0].item() == pytest.approx(1.2)


def gradient_of(logp: Tensor) -> Tensor:
    """Finite differences of the PPO loss in each log-prob."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    built, out = stack("ppo", {}), []
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-6
        up, down = (evaluate(built, [make(logp + s, old, old, -1.0)]).loss for s in (step, -step))
        out.append((up - down) / 2e-6)
    return torch.tensor(out, dtype=torch.float64)


def test_gradient_by_finite_differences() -> None:
    logp = torch.tensor([-0.9, -2.5, -0.4], dtype=torch.float64)  # inside, clipped below, inside
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    outcome = evaluate(stack("ppo", {}), [make(logp, old, old, -1.0)])
    torch.testing.assert_close(outcome.grads[0], gradient_of(logp), rtol=1e-6, atol=1e-8)
    assert outcome.grads[0][1] == 0
