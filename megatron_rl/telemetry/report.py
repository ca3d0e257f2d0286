"""A run as one page that needs nothing else: report.html, with plotly.js inside."""

from __future__ import annotations

import html
import json
import string
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.charts import build_charts
from megatron_rl.telemetry.headline import Card, build_cards
from megatron_rl.telemetry.metrics import read_metrics

TEMPLATE = Path(__file__).with_name("report.html")
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"


def write_report(run_dir: str | Path) -> Path:
    """Writes `<run_dir>/report.html` from its metrics.jsonl and, if there is one, summary.json; returns its path.

    Raises:
        ValueError: metrics.jsonl is missing, broken or empty.
    """
    from plotly.offline import get_plotlyjs  # half a second to import

    folder = Path(run_dir)
    rows = read_metrics(folder)
    if not rows:
        raise ValueError(f"{folder}: metrics.jsonl is empty; there is nothing to report before the first step")
    summary_file = folder / SUMMARY_FILE
    summary: dict[str, Any] = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    page = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(folder.resolve().name),
        subtitle=html.escape(_subtitle(summary, rows[-1]["step"])),
        cards="\n".join(_card(card) for card in build_cards(summary, rows)),
        summary=_facts(summary),
        charts=_script_json([asdict(chart) for chart in build_charts(rows)]),
        plotly=get_plotlyjs(),
    )
    report = folder / REPORT_FILE
    report.write_text(page, encoding="utf-8")
    return report


def _subtitle(summary: Mapping[str, Any], last_step: int) -> str:
    parts = [f"{summary.get('steps', last_step)} steps"]
    for key, label in (("megatron_core", "Megatron-core"), ("sglang", "SGLang"), ("seed", "seed")):
        if key in summary:
            parts.append(f"{label} {summary[key]}")
    return " · ".join(parts)


def _card(card: Card) -> str:
    lines = (("label", card.label), ("value", card.value), (f"detail {card.tone}".strip(), card.detail))
    return '<div class="card">' + "".join(f'<div class="{kind}">{html.escape(text)}</div>' for kind, text in lines) + "</div>"


def _facts(summary: Mapping[str, Any]) -> str:
    """summary.json as a list, nested objects flattened to dotted names; empty when there is none."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        flat.update({f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value})
    lines = [f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(_plain(value))}</dd></div>" for name, value in flat.items()]
    return f"<h2>summary.json</h2><dl>{''.join(lines)}</dl>" if lines else ""


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
