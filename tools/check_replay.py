"""Watches every router of every layout: what it chose, forward and recomputed, is what was given for each token.

    python tools/check_replay.py            all 162: layouts x recomputation x {1, 4} micro-batches x models, and stages without a router
    python tools/check_replay.py --quick    the covering that the tests run

Each combination scores a ragged, packed batch with random routes, routes it live, and trains on it with the routes again. Exit status 1
if a multi-hot map differs from the routes given, or a token passed a layer's router more or less often than once a forward and once a
recomputation. Three runs with routes put wrong must be found wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from tools.layouts.launch import torchrun
from tools.layouts.matrix import LAYOUTS
from tools.layouts.replays import ReplayCase, faults, full, problem, quick
from tools.layouts.runs import make_models, run_cases


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a covering instead of all combinations")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, "one"], default=[*LAYOUTS, "one"], help="only these")
    parser.add_argument("--megatron", type=Path, help="a folder with another megatron-core, put first on the module path")
    options = parser.parse_args(argv)
    cases = [case for case in (*(quick() if options.quick else full()), *faults()) if (case.layout or "one") in options.layouts]
    rows = failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        make_models(Path(temporary))
        for processes in sorted({case.where.processes for case in cases}):
            mine = [case for case in cases if case.where.processes == processes]
            found = run_cases(Path(temporary), mine, launch=partial(torchrun, path=options.megatron))
            failures += show(mine, found)
            rows += sum(found[case.name]["rows"] for case in mine if case.fault == "none")
    print(f"{sum(case.fault == 'none' for case in cases)} combinations, {rows:,} rows, {failures} failures")
    return int(failures > 0)


def show(cases: Sequence[ReplayCase], found: Mapping[str, Any]) -> int:
    """A line each; how many are not as they have to be."""
    table = Table("layout", "model", "recompute", "micro-batches", "rows", "found", box=None)
    failures = 0
    for case in cases:
        seen, wrong = found[case.name], problem(case, found[case.name])
        failed = (wrong is not None) != (case.fault != "none")
        failures += failed
        told = wrong or "as given"
        what = case.recompute if case.fault == "none" else f"{case.recompute}, wrong {case.fault}"
        counts = str(seen["micro_batches"]), str(seen["rows"])
        table.add_row(case.layout or "one", case.model, what, *counts, f"[bold red]{told}" if failed else told)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return failures


if __name__ == "__main__":
    sys.exit(main())
