"""The figures over training steps, from a run's metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_rl.page.figure import Axis, Figure, Section, Series, slug
from megatron_rl.telemetry.names import find_metric

Row = Mapping[str, Any]
SMOOTHING = 10
"""Steps of the trailing mean drawn over the reward."""
SMALLEST_PHASE = 0.01
"""Share of the time below which a phase is not drawn on its own."""
POINTS = 800
"""Points a curve is drawn with at most; what is left out of a longer one is neither the highest nor the lowest near it."""
KEPT = ("kept_share", "accepted", "effective_share", "kept_mass")
CUT = ("clip_share", "masked_share", "capped_share", "below_share", "above_share", "outside_share", "replaced_share")
"""What a metric's name holds, after the slash, when it says how much of a batch a method kept, or how much it changed."""
SHARE = Axis("share", "percent", zero=True)


@dataclass
class Metrics:
    """Columns of metrics.jsonl, and which of them a figure has used."""

    rows: Sequence[Row]
    used: set[str] = field(default_factory=lambda: {"step", "time", "weight_version"})

    def names(self) -> list[str]:
        """Every metric's name, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> tuple[list[float], list[float | None]]:
        """(steps, values) where the metric was written; None where it was not finite."""
        self.used.add(name)
        pairs = [(row["step"], row[name]) for row in self.rows if name in row]
        return [step for step, _ in pairs], [value if math.isfinite(value) else None for _, value in pairs]

    def series(self, name: str, label: str, **look: Any) -> list[Series]:
        """The metric as a curve; nothing where it was never written."""
        x, y = thinned(*self.column(name))
        return [Series(label, x, y, **look)] if x else []

    def matching(self, parts: Sequence[str]) -> list[str]:
        """Names of methods' metrics that hold one of the parts after the slash."""
        return [name for name in self.names() if any(part in name.partition("/")[2] for part in parts)]

    def last(self, name: str) -> float | None:
        """The mean of the last quarter of the metric's finite values."""
        values = [value for value in self.column(name)[1] if value is not None]
        return fmean(values[-math.ceil(len(values) / 4) :]) if values else None


def build_sections(rows: Sequence[Row]) -> list[Section]:
    """The figures of a run under headings, without those that have no data; what no figure shows stands folded at the end."""
    m = Metrics(rows)
    sections = [
        Section("outcome", "Outcome", "What the run was for.", _outcome(m)),
        Section(
            "mismatch",
            "Mismatch of trainer and engine",
            "d is the log-prob of a sampled token in the trainer less that in the engine. With routes replayed only numerics remain.",
            _mismatch(m),
        ),
        Section("routing", "Routing", "Where the trainer's routers choose other experts than the engine's did.", _routing(m)),
        Section("acceptance", "Acceptance", "How much of each batch the methods let through unchanged.", _acceptance(m)),
        Section("optimisation", "Optimisation", "", _optimisation(m)),
        Section("time", "Time", "", _time(m)),
    ]
    rest = [_explained(m, name) for name in m.names() if name not in m.used]
    sections.append(Section("rest", "Every other metric", "", rest, folded=True))
    drawn = [(section, [figure for figure in section.items if isinstance(figure, Figure) and figure.series]) for section in sections]
    return [Section(s.key, s.title, s.note, figures, s.folded) for s, figures in drawn if figures]


def _outcome(m: Metrics) -> list[Figure]:
    return [
        _reward(m),
        _single(
            m, "response/length", "Response length", "Mean sampled tokens an answer. A surge often comes before a collapse.", unit="tokens"
        ),
        _single(m, "entropy", "Entropy", "Of the policy, mean a token. A fall to 0 is a collapse.", unit="nats"),
        _single(m, "response/truncated_share", "Answers cut off", "At the limit of new tokens.", axis=SHARE),
    ]


def _reward(m: Metrics) -> Figure:
    x, y = m.column("reward/mean")
    curves = []
    if x:
        curves += [Series("each step", *thinned(x, y), kind="faint")]
        curves += [Series(f"mean of {SMOOTHING} steps", *thinned(x, trailing_mean(y, SMOOTHING)))]
    curves += m.series("eval/pass_rate", "held-out, sampled", kind="points", color=1)
    curves += m.series("eval/greedy_pass_rate", "held-out, greedy", kind="points", color=2)
    note = "Mean reward of the sampled answers, and the pass rate on held-out prompts."
    return Figure("reward", "Reward", note, curves, wide=True)


def _mismatch(m: Metrics) -> list[Figure]:
    return [
        _by_routing(
            m,
            "k3",
            "Mismatch, k3",
            "Mean of exp(d) − 1 − d, an unbiased estimate of the divergence. Lower is better; the axis is logarithmic.",
        ),
        _by_routing(
            m,
            "max_abs",
            "Largest |d|",
            "Of any token in the step. Values near 1 and above mean that single tokens are routed or rounded away.",
        ),
        _by_routing(m, "mean_abs", "Mean |d|", "Over all sampled tokens."),
        _grouped(
            m, "routing/abs_d/flips_", "Mean |d| by flipped layers", "Tokens by the number of layers that route them otherwise.", "nats"
        ),
        _grouped(
            m,
            "routing/prefix_drift/flips_",
            "Prefix drift by flipped layers",
            "Mean |sum of d| over a prefix, by the flips in that prefix.",
            "nats",
        ),
        _bounds(m),
    ]


def _by_routing(m: Metrics, name: str, title: str, note: str) -> Figure:
    curves = m.series(f"mismatch/{name}_replay", "routes replayed", color=0)
    curves += m.series(f"mismatch/{name}_live", "routed live", color=1)
    curves += m.series(f"mismatch/{name}_trained", "as trained", color=2, dashed=True)
    return Figure(f"mismatch_{name}", title, note, curves, y=Axis("nats", log=True))


def _grouped(m: Metrics, prefix: str, title: str, note: str, unit: str) -> Figure:
    names = sorted(name for name in m.names() if name.startswith(prefix))
    curves = [s for color, name in enumerate(names) for s in m.series(name, f"{name.removeprefix(prefix)} flips", color=color)]
    return Figure(slug(prefix), title, note, curves, y=Axis(unit, log=True))


def _bounds(m: Metrics) -> Figure:
    names = [name for name in m.names() if name.startswith("bounds/")]
    curves = [
        s for color, name in enumerate(names) for s in m.series(name, slug(name.removeprefix("bounds/")).replace("_", " "), color=color)
    ]
    note = "On the error of the surrogate. The smallest one counts: a surrogate above it certifies an improvement."
    return Figure("bounds", "Bounds", note, curves, y=Axis("reward", log=True))


def _routing(m: Metrics) -> list[Figure]:
    shares = m.series("routing/token_mismatch_share", "tokens, in at least one layer", color=1)
    shares += m.series("routing/replayed/token_mismatch_share", "tokens, with routes replayed so far", color=0)
    shares += m.series("routing/moved/token_mismatch_share", "tokens, after the step's updates", color=2)
    shares += m.series("routing/layer_mismatch_share", "token-layer pairs", color=3)
    margins = m.series("routing/margin_at_flips", "where they differ", color=1) + m.series("routing/margin_elsewhere", "elsewhere", color=0)
    load = m.series("routing/load_violation_live", "trainer's choice", color=1) + m.series(
        "routing/load_violation_given", "engine's", color=0
    )
    return [
        Figure(
            "routed_otherwise",
            "Routed otherwise",
            "Share that the trainer sends to other experts than the engine did, or than it did itself before the update.",
            shares,
            y=SHARE,
        ),
        _layers(m),
        Figure(
            "margins",
            "Margin of the router",
            "Gap between the last chosen expert and the next. Small margins flip.",
            margins,
            y=Axis("log-score", zero=True),
        ),
        Figure("load", "Imbalance of experts", "Largest load over the mean load, less 1.", load, y=Axis(zero=True)),
    ]


def _layers(m: Metrics) -> Figure:
    prefix = "routing/exact/layer_"
    names = sorted(name for name in m.names() if name.startswith(prefix))
    shares = [(str(int(name.removeprefix(prefix))), m.last(name)) for name in names]
    bars = [Series("share", [layer for layer, _ in shares], [None if y is None else 1 - y for _, y in shares], "bars", 1)] if shares else []
    note = "Share of tokens that a layer sends to other experts, mean of the last quarter of the run."
    return Figure("flips_by_layer", "Flips by layer", note, bars, x=Axis("MoE layer", "text"), y=SHARE)


def _acceptance(m: Metrics) -> list[Figure]:
    def curves(names: Sequence[str]) -> list[Series]:
        labels = [name.replace("/", ": ").replace("_", " ") for name in names]
        return [s for color, (name, label) in enumerate(zip(names, labels, strict=True)) for s in m.series(name, label, color=color)]

    note = (
        "1 leaves the batch alone. A value that falls while the mismatch grows is a method at work; one near 0 leaves little to train on."
    )
    return [
        Figure("kept", "Kept", note, curves(m.matching(KEPT)), y=SHARE),
        Figure("changed", "Clipped, capped or masked", "Share of tokens.", curves(m.matching(CUT)), y=SHARE),
    ]


def _optimisation(m: Metrics) -> list[Figure]:
    return [
        _single(m, "loss", "Loss", "What the optimizer steps on."),
        _single(m, "grad_norm", "Gradient norm", "Global, before clipping.", axis=Axis(zero=True)),
        _single(m, "lr", "Learning rate", "", axis=Axis(zero=True)),
        _single(
            m, "lag/mean", "Staleness", "Weight versions between sampling and training, mean a token.", axis=Axis("versions", zero=True)
        ),
    ]


def _time(m: Metrics) -> list[Figure]:
    speed = Axis("tokens/s", "integer", zero=True)
    return [_phases(m), _single(m, "tokens_per_second", "Throughput", "Tokens a second, over the whole step.", axis=speed)]


def _phases(m: Metrics) -> Figure:
    """Stacks the phases, the costliest at the bottom; small ones and what no phase accounts for are "other", on top."""
    m.used.add("seconds/step")
    steps = [row for row in m.rows if "seconds/step" in row]
    names = {name for row in steps for name in row if name.startswith("seconds/") and name != "seconds/step"}
    m.used.update(name for name in m.names() if name.startswith("seconds/"))
    whole = sum(row["seconds/step"] for row in steps)
    totals = {name: sum(row.get(name, 0.0) for row in steps) for name in sorted(names)}
    large = sorted((name for name, total in totals.items() if total >= SMALLEST_PHASE * whole), key=lambda name: -totals[name])
    columns = {name.removeprefix("seconds/"): [row.get(name, 0.0) for row in steps] for name in large}
    columns["other"] = [max(0.0, row["seconds/step"] - sum(row.get(name, 0.0) for name in large)) for row in steps]
    every = max(1, math.ceil(len(steps) / POINTS))  # stacked areas share their steps
    x = [row["step"] for row in steps][::every]
    curves = [Series(name, x, y[::every], "stack", color) for color, (name, y) in enumerate(columns.items()) if any(y)]
    return Figure("seconds", "Seconds a step, by stage", "Wall clock, stacked.", curves, y=Axis("s", zero=True))


def _single(m: Metrics, name: str, title: str, note: str, unit: str = "", axis: Axis | None = None) -> Figure:
    return Figure(slug(name), title, note, m.series(name, title), y=axis or Axis(unit))


def _explained(m: Metrics, name: str) -> Figure:
    """A metric that has no figure of its own, with what docs/metrics.md says of it."""
    row = find_metric(name)
    return _single(m, name, name, "") if row is None else _single(m, name, name, f"{row.meaning[0].upper()}{row.meaning[1:]}.", row.unit)


def trailing_mean(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of the last `width` values at each place; None among them is left out."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(window) / len(window) if window else None)
    return means


def thinned(x: Sequence[float], y: Sequence[float | None], points: int = POINTS) -> tuple[list[float], list[float | None]]:
    """At most about `points` points: of each stretch the lowest and the highest, so that no spike is lost, and a gap if there is one."""
    if len(x) <= points:
        return list(x), list(y)
    size = math.ceil(2 * len(x) / points)
    kept: set[int] = set()
    for start in range(0, len(x), size):
        stretch = range(start, min(start + size, len(x)))
        finite = {i: value for i in stretch if (value := y[i]) is not None}
        kept |= {i for i in stretch if i not in finite and (i == start or i - 1 in finite)}
        kept |= {min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)} if finite else set()
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]
