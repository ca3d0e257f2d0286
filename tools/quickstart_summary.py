"""Completes a quickstart's summary.json with the whole job's seconds, and prints what came of it.

usage: python tools/quickstart_summary.py runs/quickstart TOTAL_SECONDS "stage=seconds" ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.files import write_json
from megatron_rl.telemetry.report import write_report


def main() -> None:
    folder, total, stages = Path(sys.argv[1]), float(sys.argv[2]), dict(s.rsplit("=", 1) for s in sys.argv[3:])
    summary = json.loads((folder / "summary.json").read_text())
    summary["seconds"] = total
    summary["seconds_by_stage"] = {name: float(seconds) for name, seconds in stages.items()}
    write_json(folder / "summary.json", summary)
    write_report(folder)
    table = Table(title=f"quickstart: {total:.0f} s", show_header=False)
    rows = {
        "pass rate, before -> after": f"{summary['pass_rate_before']:.3f} -> {summary['pass_rate_after']:.3f}",
        "mismatch k3, with replay / without": f"{summary['k3_replay']:.1e} / {summary['k3_live']:.1e}",
        "tokens routed otherwise without replay": f"{summary['route_mismatch_share']:.1%}",
        "three engines answer alike": "yes" if summary["export_matches"] else "no",
        "Megatron checkpoint": summary["checkpoint"],
        "Hugging Face export": summary["export"],
        "metrics": f"{folder}/metrics.jsonl, {folder}/tensorboard",
        "report": f"{folder}/report.html",
        "seconds by stage": ", ".join(f"{name} {seconds}" for name, seconds in stages.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    main()
