"""Pictures of methods that put no weight on a token's gradient: advantages, rewards, steps, learning rates. Asked of the real functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from megatron_rl.methods import dvp, gae, group, kl_in_reward, length_lr, mipu, overlong, step_advantage, vcpo
from megatron_rl.methods.objective import Tokens
from megatron_rl.methods.segments import LocalSegments

from .chart import Chart, Colour, Line, Picture

OUTCOMES: dict[Colour, str] = {1: "R = 1", -1: "R = 0"}
REWARDS: dict[Colour, float] = {1: 1.0, -1: 0.0}


@dataclass(frozen=True)
class Sketch:
    """A picture made by a function of its own."""

    caption: str
    make: Callable[[], Chart]

    def chart(self, name: str) -> Chart:
        """The function knows its method."""
        return self.make()


def _gae() -> Chart:
    """A critic that expects 0.3 of the prompt and 0.7 of the whole answer."""
    n = 48
    values_N, mask_N = np.linspace(0.3, 0.7, n), np.ones(n, dtype=bool)
    lines = []
    for dash, lam in enumerate((1.0, 0.95, 0.0)):
        for colour, reward in REWARDS.items():
            advantages_N, _ = gae.gae(gae.reward_at_end(mask_N, reward), values_N, mask_N, 1.0, lam)
            lines.append(Line(np.arange(1.0, n + 1), advantages_N, colour, dash, f"lam = {lam:g}"))
    return Chart(tuple(lines), "loss token of the answer", "advantage", None, OUTCOMES)


def _group() -> Chart:
    """Groups of eight, of which k are right."""
    right = np.arange(1, 8)
    lines = []
    for dash, (label, config) in enumerate({"scale_by_std": group.GroupConfig(), "without": group.GroupConfig(scale_by_std=False)}.items()):
        both = np.array([group.group_advantages([1.0] * k + [0.0] * (8 - k), ["g"] * 8, config)[[0, -1]] for k in right])
        lines += [Line(right / 1.0, both[:, 0], 1, dash, label), Line(right / 1.0, both[:, 1], -1, dash, label)]
    return Chart(tuple(lines), "right answers in a group of 8", "advantage", None, {1: "right answer", -1: "wrong answer"})


def _step_advantage() -> Chart:
    """Five steps, the third a mistake that the fourth mends."""
    values = [0.4, 0.5, 0.65, 0.2, 0.7]
    steps = np.arange(1.0, 6.0)
    lines = [Line(steps, np.array(values), 0, 2, "V before the step")]
    for colour, reward in REWARDS.items():
        lines.append(Line(steps, step_advantage.step_advantages(values, reward), colour, 0, "A of the step"))
    return Chart(tuple(lines), "step of the answer", "advantage, value", None, OUTCOMES)


def _kl_in_reward() -> Chart:
    x_N, mask_N = np.linspace(-2, 2, 401), np.ones(401, dtype=bool)
    estimators: tuple[Literal["k1", "k2", "k3"], ...] = ("k1", "k2", "k3")
    lines = []
    for dash, estimator in enumerate(estimators):
        config = kl_in_reward.KLInRewardConfig(beta=1.0, estimator=estimator)
        lines.append(Line(x_N, kl_in_reward.kl_in_reward(x_N, np.zeros(401), mask_N, config), 0, dash, estimator))
    x_label = r"log-ratio  $\log\,\pi_{\mathrm{old}} - \log\,\pi_{\mathrm{ref}}$  (nats)"
    return Chart(tuple(lines), x_label, "added to the reward", None, {})


def _overlong() -> Chart:
    lengths = np.linspace(12000, 24000, 401)
    penalty = overlong.overlong_penalty(lengths.astype(int).tolist(), overlong.OverlongConfig(), 20480)
    return Chart((Line(lengths / 1000, penalty, 0),), "answer's length (thousand tokens)", "added to the reward", None, {})


def _length_lr() -> Chart:
    """Answers of 1000 tokens grow to 3500 between steps 90 and 120."""
    steps = np.arange(1, 801)
    lengths = np.interp(steps, [90, 120], [1000.0, 3500.0])
    state, factors = length_lr.LengthLRState(), []
    for length in lengths:
        state, factor = length_lr.length_lr(state, float(length), length_lr.LengthLRConfig())
        factors.append(factor)
    x = steps / 1.0
    lines = (Line(x, np.array(factors), 1, 0), Line(x, lengths / 3500, -1, 1))
    return Chart(lines, "rollout step", "factor", (0, 1.1), {1: "factor of the learning rate", -1: "mean length / 3500 tokens"})


def _vcpo() -> Chart:
    """Log-weights of 256 sequences, normal with growing spread."""
    spreads = np.linspace(0, 2, 101)
    draws = np.random.default_rng(0).standard_normal(256)
    lines = []
    for dash, reference in enumerate((1.0, 0.5)):
        config = vcpo.VCPOConfig(reference_share=reference)
        factors = [vcpo.vcpo(vcpo.VCPOState(), (s * draws).tolist(), config)[1] for s in spreads]
        lines.append(Line(spreads, np.array(factors), 0, dash, f"reference_share {reference:g}"))
    return Chart(tuple(lines), "standard deviation of the sequences' log-weights (nats)", "factor of the learning rate", (0, 1.1), {})


def _mipu() -> Chart:
    """One summand of T-hat for a right answer of eight tokens."""
    x_N = np.linspace(-0.2, 0.2, 201)
    lines = []
    estimators: tuple[Literal["first_order", "sequence"], ...] = ("first_order", "sequence")
    for dash, estimator in enumerate(estimators):
        config = mipu.MIPUConfig(estimator=estimator)
        lines.append(Line(x_N, mipu.gap_terms([1.0] * len(x_N), [np.full(8, x) for x in x_N], config), 0, dash, estimator))
    return Chart(tuple(lines), r"log-ratio  $\log\,\pi' - \log\,\mu'$  of each token (nats)", r"summand of $\hat T$", None, {})


def _dvp() -> Chart:
    """An answer of 24 tokens of which the ninth lies outside the support."""
    n, zeros_T = 24, torch.zeros(24)
    inside_T = torch.arange(1, n + 1) != 9
    segments = LocalSegments(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), 1)
    tokens = Tokens.of(zeros_T, zeros_T, zeros_T, zeros_T, segments, inside_T=inside_T, kept_mass_T=torch.ones(n))
    reaches: dict[Colour, dvp.Reach] = {1: "token", -1: "suffix", 0: "sequence"}
    lines = []
    for colour, reach in reaches.items():
        keep_T = dvp.correct(tokens, dvp.DVPConfig(support="unpruned", reach=reach)).keep_T
        lines.append(Line(np.arange(1.0, n + 1), keep_T.double().numpy(), colour))
    names: dict[Colour, str] = {colour: f"reach {reach}" for colour, reach in reaches.items()}
    return Chart(tuple(lines), "loss token of the answer", "weight", (-0.1, 1.3), names, "steps-mid")


SKETCHES: dict[str, Picture] = {
    "gae": Sketch("A critic whose value rises from 0.3 at the prompt to 0.7 at the end; `gamma: 1`, before whitening.", _gae),
    "group": Sketch("Rewards 1 and 0. Dashed: `scale_by_std: false`. Groups of 0 or 8 right answers get 0.", _group),
    "step_advantage": Sketch("Five steps with values 0.4, 0.5, 0.65, 0.2 and 0.7 before them: the third is a mistake.", _step_advantage),
    "kl_in_reward": Sketch("For `beta: 1`.", _kl_in_reward),
    "overlong": Sketch("Defaults, with `rollout.max_new_tokens: 20480`.", _overlong),
    "length_lr": Sketch("Answers of 1000 tokens grow to 3500; the surge is at step 115, the period 207 steps.", _length_lr),
    "vcpo": Sketch("256 sequences with normal log-weights.", _vcpo),
    "mipu": Sketch("A right answer of eight tokens that are all shifted alike.", _mipu),
    "dvp": Sketch("`support: unpruned`, where the ninth token of an answer lies outside the support.", _dvp),
}
"""By name of the method."""
