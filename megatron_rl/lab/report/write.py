"""From a measurement and its numbers to report.html."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...page.figure import NEUTRAL, Figure, Page, Section, Series, Table
from ...page.html import write_page
from ...telemetry.charts import build_sections
from ...telemetry.metrics import read_metrics
from ..records import Measurement
from . import causes, headline, methods, overview, sequences, tokens
from .view import View

REPORT_FILE = "report.html"
TIMELINE = ("mismatch", "routing", "acceptance", "outcome")
"""Sections of the training view that the report takes over."""


def write_report(measurement: Measurement, summary: Mapping[str, Any], out: str | Path, run: str | Path | None = None) -> Path:
    """Writes the page, and each figure's data to csv/ beside it.

    Args:
        measurement: what was measured; the figures bin its tokens and compute nothing else.
        summary: what `megatron_rl.lab.summary.summarise` made of it.
        out: a folder, in which it becomes report.html, or the HTML file.
        run: logging.dir of the training run that the measurement belongs to; its metrics become the timeline.

    Returns:
        The HTML file.

    Raises:
        ValueError: the run has no metrics, or a broken line among them.
    """
    path = Path(out)
    return write_page(report_page(measurement, summary, run), path if path.suffix == ".html" else path / REPORT_FILE)


def report_page(measurement: Measurement, summary: Mapping[str, Any], run: str | Path | None = None) -> Page:
    """The report as data."""
    views = [
        View(sample, summary["engines"][name], "" if i == 0 else f"engine{i}_")
        for i, (name, sample) in enumerate(measurement.samples.items())
    ]
    main, others = views[0], views[1:]
    sections = [overview.overview(views), *_sections(main), *_timeline(main, run), *_more_methods(main)]
    sections += [_folded(f"The same for engine {view.name}", view, _sections(view)) for view in others]
    meta = dict(measurement.meta)
    return Page(
        f"Mismatch of trainer and engine: {_model(meta)}",
        _subtitle(meta, views),
        headline.cards(main),
        sections,
        meta,
        headline.finding(main),
    )


def _sections(view: View) -> list[Section]:
    return [
        tokens.distribution(view),
        *causes.attribution(view),
        *causes.routing(view),
        sequences.sequences(view),
        sequences.bounds(view),
        *methods.methods(view, view.trained[:1]),
    ]


def _more_methods(view: View) -> list[Section]:
    """The methods' tables of the other trained conditions, folded."""
    return [
        replace(section, key=f"more_{section.key}", title="What each method would do under other conditions", folded=True)
        for section in methods.methods(view, view.trained[1:])
    ]


def _folded(title: str, view: View, sections: list[Section]) -> Section:
    items = [overview.conditions(view), *(item for section in sections for item in section.items)]
    return Section(view.key("all"), title, "", items, folded=True)


def _timeline(view: View, run: str | Path | None) -> list[Section]:
    """The training view's figures, with the measured floor in those of the mismatch."""
    if run is None:
        return []
    found = {section.key: section for section in build_sections(read_metrics(run))}
    items = [_with_floor(view, item) for key in TIMELINE if key in found for item in found[key].items]
    note = f"Metrics of the run {Path(run).resolve().name}, step by step, beside the floor that was measured here."
    return [Section("timeline", "Over training steps", note, items)] if items else []


def _with_floor(view: View, item: Figure | Table) -> Figure | Table:
    floor = view.floor({"mismatch_k3": "mean_k3", "mismatch_max_abs": "max_abs_d", "mismatch_mean_abs": "mean_abs_d"}.get(item.key, ""))
    item = replace(item, key=f"run_{item.key}")
    if not floor or not isinstance(item, Figure):
        return item
    steps = [float(x) for series in item.series for x in series.x]
    ends = [min(steps), max(steps)] if steps else []
    return replace(item, series=[*item.series, Series("floor", ends, [floor] * len(ends), "line", NEUTRAL, dashed=True)])


def _model(meta: Mapping[str, Any]) -> str:
    return Path(str(meta.get("model", "a model"))).name


def _subtitle(meta: Mapping[str, Any], views: list[View]) -> str:
    parts = ["engines " + ", ".join(view.name for view in views)]
    parts += [f"{key} {meta[key]}" for key in ("machine", "seed", "date") if isinstance(meta.get(key), (str, int))]
    return " · ".join(parts)
