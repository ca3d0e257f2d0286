"""Which picture each method gets: the log-ratio it looks at, the tokens around the probed one, and what a reader must know of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .chart import Chart, Colour, Line, Picture
from .curves import POINTS, Pair, Probe, slope
from .sketches import SKETCHES

AXIS: dict[Pair, str] = {
    "theta/old": r"log-ratio  $\log\,\pi_\theta - \log\,\pi_{\mathrm{old}}$  (nats)",
    "theta/mu": r"log-ratio  $\log\,\pi_\theta - \log\,\mu$  (nats)",
    "old/mu": r"log-ratio  $\log\,\pi_{\mathrm{old}} - \log\,\mu$  (nats)",
    "theta/reference": r"log-ratio  $\log\,\pi_\theta - \log\,\pi_{\mathrm{ref}}$  (nats)",
}
ONE = (Probe(),)
PREFIX = tuple(Probe(f"t = {t}", moves="sequence", length=64, position=t) for t in (1, 8, 64))
PROBABILITIES = tuple(Probe(f"p = {p:g}", prob=p) for p in (0.1, 0.5))
PROBABLE = "p is μ's probability of the token; a curve ends where the other policy's would exceed 1."
TOGETHER = "All tokens of a sequence are shifted alike."


@dataclass(frozen=True)
class Weights:
    """The weight against a log-ratio, for both signs of the advantage."""

    pair: Pair
    span: tuple[float, float]
    probes: tuple[Probe, ...] = ONE
    caption: str = ""
    y_range: tuple[float, float] | None = None
    signed: bool = True
    """False where the advantage plays no part: the slope itself is shown."""
    x_label: str = ""

    def chart(self, name: str) -> Chart:
        """Asks the method."""
        x_N = np.linspace(*self.span, POINTS)
        signs: tuple[Colour, ...] = (1, -1) if self.signed else (0,)
        lines = tuple(
            Line(x_N, slope(name, self.pair, x_N, probe, float(sign)) / (sign or 1), sign, dash, probe.label)
            for dash, probe in enumerate(self.probes)
            for sign in signs
        )
        y_label = r"weight on $A\,\nabla \log\,\pi_\theta$" if self.signed else r"weight on $\nabla \log\,\pi_\theta$"
        return Chart(lines, self.x_label or AXIS[self.pair], y_label, self.y_range)


WEIGHTS: dict[str, Weights] = {
    "ppo": Weights("theta/old", (-1.5, 1.5)),
    "grpo": Weights("theta/old", (-1, 1)),
    "dr_grpo": Weights("theta/old", (-1, 1)),
    "dapo_dynamic": Weights("theta/old", (-1, 1)),
    "gspo": Weights("theta/old", (-1e-3, 1e-3), (Probe(moves="sequence", length=8),), TOGETHER, (-0.1, 1.3)),
    "gspo_token": Weights("theta/old", (-1e-3, 1e-3), (Probe(moves="sequence", length=8),), TOGETHER, (-0.1, 1.3)),
    "gmpo": Weights(
        "theta/old",
        (-1, 1),
        (Probe("all 8 tokens move", moves="sequence", length=8), Probe("one of 8 moves", length=8)),
        "The token's own weight, before the division by the 8 tokens of its sequence.",
    ),
    "cispo": Weights(
        "theta/old", (-1, 1), (Probe("defaults"), Probe("with unified_mask", {"unified_mask": True, "clip_low": 0.2})),
        "Dashed: `unified_mask` with `clip_low: 0.2`.",
    ),
    "sapo": Weights("theta/old", (-2, 2)),
    "sspo": Weights(
        "theta/old",
        (-3, 3),
        (Probe("all 8 tokens move", moves="sequence", length=8), Probe("one of 8 moves", length=8)),
        "The token's own weight, before the division by the 8 tokens of its sequence; default gate and constants [I].",
    ),
    "minirl": Weights(
        "theta/old",
        (-1, 1),
        (Probe("old = μ"), Probe("old = 1.3 μ", gap=float(np.log(1.3)))),
        "The mask looks at θ/old, the weight is θ/μ: a gap between the engines scales it.",
    ),
    "minpro": Weights(
        "theta/mu",
        (-1, 1),
        (Probe("t = 1", moves="sequence", length=64), Probe("t > 1", moves="sequence", length=64, position=8)),
        TOGETHER + " From the second token on, the smallest ratio so far multiplies the own one.",
    ),
    "pnpo": Weights("theta/old", (-0.1, 0.1), PREFIX, TOGETHER + " Window and dual clip are inferred [I].", (-0.1, 1.3)),
    "ctpo": Weights("theta/old", (-0.1, 0.1), PREFIX, TOGETHER, (-0.1, 1.8)),
    "epic": Weights("theta/mu", (-0.5, 0.5), PREFIX, TOGETHER + " A reconstruction [I].", (-0.1, 2.5)),
    "nfpo": Weights(
        "theta/mu",
        (-1, 1),
        (
            Probe("last token", moves="sequence", length=8, position=8, prob=0.2),
            Probe("N = 2", moves="sequence", length=8, prob=0.2),
            Probe("N = 4", {"steps": 4}, moves="sequence", length=8, prob=0.2),
        ),
        TOGETHER + " N is `steps`, 2 by default; the last token has none after it. μ(token) = 0.2; the mask is DPPO's [I].",
        (-0.1, 6),
    ),
    "vespo": Weights(
        "theta/mu", (-3, 3), (Probe(),), "The axis is the sum over the whole sequence.", None, True,
        r"sequence log-ratio  $\sum_t\;(\log\,\pi_\theta - \log\,\mu)$  (nats)",
    ),
    "drpo": Weights("theta/mu", (-2, 2), PROBABILITIES, PROBABLE, (-3, 3)),
    "dppo": Weights("theta/mu", (-2, 2), PROBABILITIES, PROBABLE + " Divergence `binary_tv`.", (-0.1, 3)),
    "cppo": Weights(
        "theta/mu",
        (-1.5, 1),
        tuple(Probe(f"t = {t}", moves="sequence", length=64, position=t, prob=0.3) for t in (1, 8, 64)),
        TOGETHER + " μ(token) = 0.3; the longer the prefix has overspent, the narrower the window.",
    ),
    "sis": Weights(
        "theta/old",
        (-1, 1),
        (Probe("u = 0.25", uniform=0.25), Probe("u = 0.75", uniform=0.75)),
        "Another candidate of the top-K became e^0.4 times likelier, so the envelope is at least that. An accepted token has weight 1.",
    ),
    "acpo_advantage": Weights("theta/old", (-1.5, 1.5)),
    "acpo_adaptive": Weights(
        "theta/old",
        (-1, 1),
        tuple(
            Probe(f"spread {spread:g}", spread=spread, prob=0.1, stays="numerator") for spread in (0.05, 0.2)
        ),
        "Spread: standard deviation of the log-ratios in the token's probability bin.",
    ),
    "sorl": Weights(
        "theta/old", (-1, 1), (Probe(moves="sequence", length=4),),
        "All tokens of the turn are shifted alike. The division of the step's gradient by ‖C‖ is not shown.",
    ),
    "rspo": Weights(
        "theta/old",
        (-1, 1),
        tuple(Probe(f"shift {s:g}", router_shift=s, moves="sequence", length=8) for s in (0.0, 0.2, 0.8)),
        TOGETHER + " Base `gmpo`; shift: the router's, in nats. γ is floored at `gamma_min: 0.5`, reached at 0.69.",
    ),
    "policy_gradient": Weights(
        "theta/mu",
        (-1, 1),
        (Probe("theta/mu", {"weight": "theta/mu"}), Probe("none", {"weight": "none"})),
        "theta/old is the same curve over log π_θ − log π_old.",
    ),
    "direct_advantage": Weights(
        "theta/old",
        (-2, 2),
        (Probe("step of one token"), Probe("of 4 tokens", moves="sequence", length=4)),
        "All tokens of a step are shifted alike; `beta: 1`. The pull ends where the step's log-ratio is A/β, here ±1, and then reverses.",
        (-4, 6),
    ),
    "nll": Weights("theta/old", (-1, 1), ONE, "Neither ratio nor advantage plays a part.", (0, 1.5), False),
    "tis": Weights(
        "old/mu", (-2, 2), (Probe("token"), Probe("sequence, T = 8", {"level": "sequence"}, moves="sequence", length=8)),
        "Level sequence: all 8 tokens are shifted alike.",
    ),
    "mis": Weights(
        "old/mu", (-1, 1), tuple(Probe(f"T = {n}", moves="sequence", length=n) for n in (1, 8, 64)),
        TOGETHER + " The product leaves the bounds the sooner, the longer the sequence is.",
    ),
    "icepop": Weights("old/mu", (-2, 2)),
    "geo_rs": Weights("old/mu", (-1.5, 1.5), (Probe(moves="sequence", length=64),), TOGETHER, (-0.1, 1.3)),
    "veto": Weights(
        "old/mu", (-12, 6), (Probe("defaults", length=64), Probe("high = 100", {"high": 100.0}, length=64)),
        "The axis is one token's log-ratio; the weight is that of every token of its sequence.", (-0.1, 1.3),
    ),
    "snis": Weights(
        "old/mu", (-0.5, 0.5), tuple(Probe(f"T = {n}", moves="sequence", length=n, spread=0.2) for n in (1, 8)),
        TOGETHER + " The mean is over a mini-batch whose log-ratios are normal with standard deviation 0.2.", (0, 6),
    ),
    "trm": Weights(
        "theta/mu",
        (-0.6, 0.6),
        tuple(Probe(c, {"criterion": c}, moves="sequence", length=64) for c in ("both", "max", "ser")),
        TOGETHER, (-0.1, 1.3),
    ),
    "opsm": Weights("theta/mu", (-1e-3, 1e-3), (Probe(moves="sequence", length=8),), TOGETHER, (-0.1, 1.3)),
    "m2po": Weights(
        "theta/mu", (-1, 1), tuple(Probe(f"spread {s:g}", spread=s) for s in (0.25, 0.5)),
        "Spread: standard deviation of the mini-batch's log-ratios; the threshold follows it.", (-0.1, 1.3),
    ),
    "mis_po": Weights(
        "theta/mu",
        (-1, 1),
        (Probe("one of 1000 moves", length=1000), Probe("all move", moves="sequence", length=8)),
        "All tokens together may move by −0.004 to 0.001 only: the geometric mean has far tighter bounds.", (-0.1, 1.3),
    ),
    "kpop": Weights("old/mu", (-2, 2), PROBABILITIES, PROBABLE, (-0.1, 1.3)),
    "kl_penalty": Weights(
        "theta/reference",
        (-2, 2),
        tuple(Probe(e, {"estimator": e, "beta": 1.0}) for e in ("k3", "k2", "k1")),
        "Added to the objective's own weight, for `beta: 1`; the advantage plays no part. For another base read its log-prob on the axis.",
        (-3, 5), False,
    ),
}  # fmt: skip

PICTURES: dict[str, Picture] = {**WEIGHTS, **SKETCHES}
"""By name. A method without an entry has a page without a picture."""
