#!/usr/bin/env python
"""Every metric as one table, from megatron_rl/telemetry/names.py.

python tools/metric_table.py > docs/metrics.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.telemetry.names import SECTIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

Made by `python tools/metric_table.py > docs/metrics.md` from `megatron_rl/telemetry/names.py`. The tests that train hold every name they
log against it.

A run writes `metrics.jsonl`, one JSON object a line: numbers over all ranks, means weighted by tokens (or answers), never means of means.
A mean over nothing is left out; a number that is not finite is null. Names in braces stand for several. What the probe says
(`mismatch/*_live`, `mismatch/*_replay`, `bounds/`, `routing/`) is of a sixteenth of the answers, every `replay.probe_every` steps.
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [HEAD]
    for title, rows in SECTIONS:
        lines += [f"## {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.unit} | {row.meaning} |" for row in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
