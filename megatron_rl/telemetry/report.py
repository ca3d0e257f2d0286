"""A run as one page that needs nothing else: report.html, with the data of each figure in csv/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.page.figure import Page
from megatron_rl.page.html import write_page
from megatron_rl.telemetry.charts import build_sections
from megatron_rl.telemetry.headline import build_cards
from megatron_rl.telemetry.metrics import read_metrics

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"


def write_report(run_dir: str | Path) -> Path:
    """Writes `<run_dir>/report.html` from its metrics.jsonl and, if there is one, summary.json; returns its path.

    Raises:
        ValueError: metrics.jsonl is missing, broken or empty.
    """
    folder = Path(run_dir)
    rows = read_metrics(folder)
    if not rows:
        raise ValueError(f"{folder}: metrics.jsonl is empty; there is nothing to report before the first step")
    summary_file = folder / SUMMARY_FILE
    summary: dict[str, Any] = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    return write_page(training_page(folder.resolve().name, rows, summary), folder / REPORT_FILE)


def training_page(name: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Page:
    """The page of a run: its headline numbers, its figures over training steps, and summary.json."""
    return Page(name, _subtitle(summary, rows[-1]["step"]), build_cards(summary, rows), build_sections(rows), summary)


def _subtitle(summary: Mapping[str, Any], last_step: int) -> str:
    parts = [f"{summary.get('steps', last_step)} steps"]
    for key, label in (("objective", "objective"), ("megatron_core", "Megatron-core"), ("sglang", "SGLang"), ("seed", "seed")):
        if key in summary:
            parts.append(f"{label} {summary[key]}")
    return " · ".join(parts)
