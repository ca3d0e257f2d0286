"""The golden vector of papers.md 14, row by row, and the golden values of other frameworks' own tests (peers.md E).

Five tokens, |A| = 1, old = mu. "grad" is the coefficient of A grad log theta before aggregation; token-sum aggregation over one sequence
exposes it: the gradient of -loss is A times it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.methods import estimators, trm
from megatron_rl.methods.cppo import CPPOConfig, allowance_T, position_weight_T
from megatron_rl.methods.epic import window
from megatron_rl.methods.objective import Tokens
from megatron_rl.methods.tokens import ratio

from .packs import evaluate, make, pack, stack

MU = torch.tensor([0.9, 0.5, 0.2, 0.1, 0.6], dtype=torch.float64)
D = torch.tensor([0, 0.1, -0.3, 0.5, -0.05], dtype=torch.float64)
SUM = "seq-mean-token-sum"


def tokens(advantage: float = 1.0) -> Tokens:
    s = make(MU.log() + D, MU.log(), advantages=advantage)
    return pack([s], [s.logp], None, padding=2, garbage=math.nan)


def grad(name: str, params: dict[str, Any], advantage: float, corrections: list[tuple[str, dict[str, Any]]] | None = None) -> Tensor:
    """Coefficient of A grad log theta, times T where the paper's objective is a mean over the sequence."""
    s = make(MU.log() + D, MU.log(), advantages=advantage)
    outcome = evaluate(stack(name, params, corrections or [], aggregation=SUM), [s], padding=2)
    return -outcome.grads[0] / advantage


def close(actual: Tensor, expected: list[float], digits: float = 6e-7) -> None:
    torch.testing.assert_close(actual[:5].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=digits)


RHO = [1, 1.105171, 0.740818, 1.648721, 0.951229]


def test_ratio_and_probability() -> None:
    close(ratio(tokens().drift_T), RHO)
    close(tokens().logp_T.exp(), [0.9, 0.552585, 0.148164, 0.164872, 0.570738])


def test_prefix_and_sequence_products() -> None:
    t = tokens()
    close(ratio(t.segments.prefix_sum(t.drift_T)), [1, 1.105171, 0.818731, 1.349859, 1.284025])
    assert ratio(t.segments.sum(t.drift_T)).item() == pytest.approx(1.284025, abs=6e-7)
    assert ratio(t.segments.mean(t.drift_T)).item() == pytest.approx(1.051271, abs=6e-7)
    before = t.segments.prefix_min_before(t.drift_T)
    close(ratio(torch.where(before.isinf(), 0.0, before)), [1, 1, 1, 0.740818, 0.740818])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (estimators.binary_tv, [0, 0.052585, 0.051836, 0.064872, 0.029262]),
        (estimators.binary_kl, [0, 0.005561, 0.009774, 0.017329, 0.001759]),
    ],
)
def test_binary_divergences(estimator: Any, expected: list[float]) -> None:
    t = tokens()
    close(estimator(t.logp_T, t.behaviour_logp_T), expected)


def test_sample_estimators() -> None:
    t = tokens()
    close(estimators.k1(t.drift_T), (-D).tolist())
    close(estimators.k2(t.drift_T), [0, 0.005, 0.045, 0.125, 0.00125])
    close(estimators.k3(t.drift_T), [0, 0.005171, 0.040818, 0.148721, 0.001229])
    assert t.segments.mean(estimators.k3(t.drift_T)).item() == pytest.approx(0.039188, abs=6e-7)
    assert t.segments.mean((ratio(t.drift_T) - 1).abs()).item() == pytest.approx(0.212369, abs=6e-7)
    log_weight_T = t.segments.prefix_sum(t.drift_T)
    close(estimators.k3(log_weight_T), [0, 0.005171, 0.018731, 0.049859, 0.034025])
    close(estimators.reverse_kl(log_weight_T), [0, 0.005346, 0.017523, 0.055099, 0.036981])


ROWS: list[tuple[str, dict[str, Any], float, list[float]]] = [
    ("ppo", {"clip_high": 0.28}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("ppo", {"clip_high": 0.28}, -1, [1, 1.105171, 0, 1.648721, 0.951229]),
    ("grpo", {"clip_high": 0.28}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("dr_grpo", {"clip_high": 0.28}, -1, [1, 1.105171, 0, 1.648721, 0.951229]),
    ("dapo_dynamic", {}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    # Reference points computed by hand from the written formulas: the vector does not list them.
    ("gspo", {}, 1, [0] * 5),  # s = 1.051271 > 1.0004: the whole sequence is clipped
    ("gspo", {}, -1, [1.051271] * 5),
    ("gspo", {"clip_high": 0.1}, 1, [1.051271] * 5),
    ("gspo_token", {"clip_high": 0.1}, 1, [1.051271] * 5),
    ("gmpo", {}, 1, [1.030455, 1.030455, 1.030455, 0, 1.030455]),
    ("gmpo", {}, -1, [1.051271] * 5),
    ("cispo", {"clip_high": 0.28}, 1, [1, 1.105171, 0.740818, 1.28, 0.951229]),
    ("cispo", {"clip_high": 0.28, "unified_mask": True}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("sapo", {}, 1, [1, 1.102120, 0.728515, 1.486739, 0.950664]),
    ("sapo", {}, -1, [1, 1.101808, 0.727269, 1.471352, 0.950606]),
    ("sspo", {}, 1, [1.045380 * x for x in (1, 0.990099, 0.917431, 0.8, 0.997506)]),
    ("minirl", {"clip_high": 0.28}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("minirl", {"clip_high": 0.28}, -1, [1, 1.105171, 0, 1.648721, 0.951229]),
    ("minpro", {"clip_high": 0.5}, 1, [1, 1.105171, 0.740818, 1.221403, 0.704688]),
    ("minpro", {"clip_high": 0.2, "clip_low": 0.2}, 1, [1, 1.105171, 0.8, 1.2, 0.8]),
    ("pnpo", {"low": 1.0, "high": 1.0}, 1, [1, 1.051271, 0.935507, 1.077884, 1.051271]),
    ("ctpo", {}, 1, [1, 0, 0.818731, 0, 0]),
    ("ctpo", {}, -1, [1, 0, 0, 0, 0]),
    ("ctpo", {"dual_clip": False}, -1, [1, 1.105171, 0, 1.349859, 1.284025]),
    ("epic", {}, 1, [1, 1.105171, 0.818731, 0, 1.284025]),  # W_hi = 1.332489 < W_4
    ("epic", {}, -1, [1, 1.105171, 0.818731, 1.349859, 1.284025]),  # W_lo = 0.700920 is below all
    ("dppo", {"threshold": 0.05, "ratio_cap": None}, 1, [1, 0, 0.740818, 0, 0.951229]),
    ("dppo", {"threshold": 0.05}, -1, [1, 1.105171, 0, 1.648721, 0.951229]),
    ("dppo", {"threshold": 0.05, "ratio_cap": 1.5}, -1, [1, 1.105171, 0, 1.5, 0.951229]),
    ("dppo", {"divergence": "binary_kl", "threshold": 0.01}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("dppo", {"divergence": "binary_kl", "threshold": 0.01}, -1, RHO),
    ("dppo", {"divergence": "binary_kl", "threshold": 0.005}, 1, [1, 0, 0.740818, 0, 0.951229]),
    ("dppo", {"divergence": "binary_kl", "threshold": 0.005}, -1, [1, 1.105171, 0, 1.648721, 0.951229]),
    ("cppo", {"threshold": 0.06, "budget": 0.002}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("cppo", {"threshold": 0.06, "budget": 0.002}, -1, [1, 1.105171, 0, 1.648721, 0]),
    ("cppo", {"budget": 0.02}, 1, RHO),
    ("cppo", {"budget": 0.02}, -1, RHO),
    ("acpo_advantage", {"alpha": 1.2}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),
    ("vespo", {}, 1, [0.703226] * 5),
    ("vespo", {}, -1, [1.199553] * 5),
    # 1 - sign(A)(pi - mu)/0.1, times rho: |pi - mu| are the binary TVs above
    ("drpo", {"threshold": 0.1}, 1, [1, 1.105171 * 0.474145, 0.740818 * 1.518364, 1.648721 * 0.351279, 0.951229 * 1.292623]),
    # rho_t times the next ratio: 1.105171, 0.740818, ...
    ("nfpo", {}, 1, [1.105171, 0.818731, 1.221403, 1.568312, 0.951229]),
    ("policy_gradient", {}, 1, RHO),
    ("policy_gradient", {"weight": "none"}, 1, [1] * 5),
    ("rspo", {"base": "grpo", "base_params": {"clip_high": 0.28}}, 1, [1, 1.105171, 0.740818, 0, 0.951229]),  # routing unmoved
    ("sorl", {"clip_high": 0.28}, 1, [1.051271] * 5),  # one turn: the sequence's geometric mean
    # one step of five tokens: log-ratio 0.25; the coefficient of grad log theta is A/beta - 0.25, times A that of A grad log theta
    ("direct_advantage", {}, 1, [1 - 0.25] * 5),
    ("direct_advantage", {}, -1, [1 + 0.25] * 5),
    ("direct_advantage", {"beta": 0.5, "base": "mu"}, 1, [2 - 0.25] * 5),
    ("direct_advantage", {"beta": 4.0}, 1, [0] * 5),  # theta has got where the advantage wants it
    ("nll", {}, 1, [1] * 5),
]


@pytest.mark.parametrize(("name", "params", "advantage", "expected"), ROWS, ids=[f"{r[0]}{r[1]}A{r[2]:+g}" for r in ROWS])
def test_gradient_coefficients(name: str, params: dict[str, Any], advantage: float, expected: list[float]) -> None:
    close(grad(name, params, advantage), expected, 2e-6)


def test_cppo_allowance() -> None:
    t = tokens()
    distance_T = estimators.binary_tv(t.logp_T, t.behaviour_logp_T)
    weight_T = position_weight_T(t, 0.8)
    close(weight_T, [1, 0.95, 0.9, 0.85, 0.8])
    tight, published = CPPOConfig(threshold=0.06, budget=0.002), CPPOConfig(budget=0.02)
    close(allowance_T(t, tight, distance_T, weight_T), [0.06, 0.06, 0.013944, -0.030909, -0.084350])
    close(allowance_T(t, published, distance_T, weight_T), [0.15, 0.15, 0.139044, 0.110391, 0.072250])


def test_cppo_soft_scales_by_the_allowance() -> None:
    """Only token 4 is beyond its allowance with A = +1, and its allowance is negative: factor 0. Raised to 0.03 by a larger budget,
    the factor is c_4 / (w_4 D_4)."""
    soft = grad("cppo", {"threshold": 0.06, "budget": 0.002, "soft": True}, 1)
    close(soft, [1, 1.105171, 0.740818, 0, 0.951229])
    # budget 0.02: c_4 = 0.06 + min(0, 0.02 * 2.85 - 0.0966087) = 0.020391; w_4 D_4 = 0.85 * 0.064872 = 0.0551412
    close(grad("cppo", {"threshold": 0.06, "budget": 0.02, "soft": True}, 1), [1, 1.105171, 0.740818, 1.648721 * 0.369804, 0.951229], 3e-5)


def test_epic_window() -> None:
    """The roots of u(W) = delta, and the same from Lambert's function: W = (delta - 1) / W_k((delta - 1) / e)."""
    special = pytest.importorskip("scipy.special")
    assert window(0.05, "reverse") == pytest.approx((0.700920, 1.332489), abs=6e-7)
    assert window(0.01, "reverse") == pytest.approx((0.861953, 1.144717), abs=6e-7)
    for delta in (1e-6, 0.01, 0.3, 0.999, 1.5, 20.0):
        low, high = window(delta, "reverse")
        # k = 0 gives the upper root (1 + v = log W with v > -1), k = -1 the lower one
        assert high == pytest.approx((delta - 1) / special.lambertw((delta - 1) / math.e, 0).real, rel=1e-9)
        if delta < 1:
            assert low == pytest.approx((delta - 1) / special.lambertw((delta - 1) / math.e, -1).real, rel=1e-9)
        else:
            assert low == 0
        low, high = window(delta, "forward")
        assert low == pytest.approx(-special.lambertw(-math.exp(-1 - delta), 0).real, rel=1e-9)
        assert high == pytest.approx(-special.lambertw(-math.exp(-1 - delta), -1).real, rel=1e-9)


def test_ctpo_window() -> None:
    t = tokens().segments.prefix_count()[:5].double()
    close(-0.025 * t**0.5, [-0.025, -0.035355, -0.043301, -0.05, -0.055902])
    close(0.05 * t**0.5, [0.05, 0.070711, 0.086603, 0.1, 0.111803])


def mismatch(name: str, params: dict[str, Any], *, pair: str = "old/mu") -> Tensor:
    """Weight x mask of a correction when old/mu (or theta/mu) has the golden log-ratios: REINFORCE with A = 1 exposes it."""
    old = MU.log() + D
    s = make(old, old, MU.log())
    return -evaluate(stack("policy_gradient", {"weight": "none"}, [(name, {**params, "pair": pair})], SUM), [s], padding=2).grads[0]


CORRECTION_ROWS: list[tuple[str, dict[str, Any], list[float]]] = [
    ("mis", {"level": "token", "low": 0.8, "high": 1.5}, [1, 1.105171, 0, 0, 0.951229]),
    ("icepop", {"low": 0.8, "high": 1.5}, [1, 1.105171, 0, 0, 0.951229]),
    ("mis", {}, [1.284025] * 5),
    ("mis", {"high": 1.2}, [0] * 5),
    ("tis", {"cap": 1.5}, [1, 1.105171, 0.740818, 1.5, 0.951229]),
    ("tis", {"level": "sequence"}, [1.284025] * 5),
    ("tis", {"level": "geometric"}, [1.051271] * 5),
    ("geo_rs", {"high": 1.05}, [0] * 5),
    ("geo_rs", {"high": 1.06}, [1] * 5),
    ("veto", {"low": 0.75}, [0] * 5),
    ("veto", {"low": 0.74}, [1] * 5),
    ("veto", {"high": 1.6}, [0] * 5),
    ("m2po", {"tau": 0.04}, [1, 1, 1, 0, 1]),
    ("m2po", {"tau": 0.0256}, [1, 1, 0, 0, 1]),  # the mean of the four smaller is 0.025625
    ("trm", {"criterion": "max", "max_threshold": 0.126}, [1] * 5),  # max k2 is 0.125
    ("trm", {"criterion": "max", "max_threshold": 0.124}, [0] * 5),
    ("trm", {"criterion": "mean", "mean_threshold": 0.0392}, [1] * 5),  # mean k3 is 0.039188
    ("trm", {"criterion": "mean", "mean_threshold": 0.0391}, [0] * 5),
    ("trm", {"criterion": "both", "max_threshold": 0.126, "mean_threshold": 0.0391}, [0] * 5),
    ("trm", {"criterion": "ser", "ratio_threshold": 0.2124}, [1] * 5),  # mean |rho - 1| is 0.212369
    ("trm", {"criterion": "ser", "ratio_threshold": 0.2123}, [0] * 5),
    ("trm", {"criterion": "length_neutral", "ratio_threshold": 0.1635}, [1] * 5),  # W/Z is 0.163479
    ("trm", {"criterion": "length_neutral", "ratio_threshold": 0.1634}, [0] * 5),
    ("mis_po", {"token_high": 1.6, "geo_high": 1.1}, [1, 1, 1, 0, 1]),
    ("mis_po", {}, [0] * 5),  # geometric mean 1.051 > 1.001
    ("kpop", {"upper": 0.015}, [1, 1, 1, 0, 1]),  # binary KLs above; the reverse ones are within 20 % of them
    ("snis", {}, [1] * 5),  # one sequence over its own mean
]


@pytest.mark.parametrize(("name", "params", "expected"), CORRECTION_ROWS, ids=[f"{r[0]}{r[1]}" for r in CORRECTION_ROWS])
@pytest.mark.parametrize("pair", ["old/mu", "theta/mu"])
def test_corrections(name: str, params: dict[str, Any], expected: list[float], pair: str) -> None:
    """theta = old here, so both pairs give the same."""
    close(mismatch(name, params, pair=pair), expected, 2e-6)


def test_snis_over_tokens() -> None:
    mean = sum(RHO) / 5
    close(mismatch("snis", {"level": "token"}), [x / mean for x in RHO], 2e-6)


def test_opsm() -> None:
    """mean(log mu - log theta) = -0.05: kept for any delta above it, whatever the advantage."""
    s = make(MU.log() + D, MU.log(), advantages=-1.0)
    for delta, kept in ((1e-4, 1.0), (-0.04, 1.0), (-0.06, 0.0)):
        outcome = evaluate(stack("policy_gradient", {}, [("opsm", {"delta": delta})]), [s])
        assert outcome.metrics["opsm/kept_share"] == kept


def test_length_neutral_weights() -> None:
    t = tokens()
    weight_T = trm.position_weight_T(t, 0.1, 0.05)
    close(weight_T, [0.316228, 0.273861, 0.2, 0.1, 0])
    spent = t.segments.sum((ratio(t.drift_T) - 1).abs() * weight_T).item()
    assert spent == pytest.approx(0.145511, abs=6e-7)
    assert spent / t.segments.sum(weight_T).item() == pytest.approx(0.163479, abs=6e-7)


def test_kpop_looks_in_both_directions() -> None:
    """KL of {0.1, 0.9} from {0.01, 0.99}: 0.1 ln 10 + 0.9 ln(0.9/0.99) = 0.1445; the other way 0.01 ln 0.1 + 0.99 ln 1.1 = 0.0713.
    An upper bound between them drops the token whichever policy is the likelier."""
    x, y = (torch.tensor([p], dtype=torch.float64).log() for p in (0.1, 0.01))
    for old, mu in ((x, y), (y, x)):
        for upper, kept in ((0.1, 0.0), (0.144, 0.0), (0.145, 1.0)):
            outcome = evaluate(stack("policy_gradient", {}, [("kpop", {"upper": upper})]), [make(old, old, mu)])
            assert outcome.metrics["kpop/kept_share"] == kept


@pytest.mark.parametrize("order", [1, -1])
def test_masks_of_several_corrections_all_have_to_pass(order: int) -> None:
    """IcePop's [0.8, 5] drops token 3, its neighbour's second moment token 4; the weights of the two multiply on the rest."""
    corrections = [("icepop", {"low": 0.8}), ("m2po", {}), ("tis", {"cap": 1.1})][::order]
    old = MU.log() + D
    outcome = evaluate(stack("policy_gradient", {"weight": "none"}, corrections, SUM), [make(old, old, MU.log())])
    close(-outcome.grads[0], [1, 1.105171 * 1.1, 0, 0, 0.951229**2], 2e-6)
