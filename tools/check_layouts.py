"""Compares every parallel layout with one process: loss, every logged statistic, gradient norm, log-probs and weights.

    python tools/check_layouts.py            the full matrix, 792 combinations: tens of minutes
    python tools/check_layouts.py --quick    the pairwise covering that the tests run

Each case scores two ragged, packed mini-batches of a tiny mixture of experts in fp32 and takes an optimizer step on each, so that the
second one sees theta away from old. Exit status 1 if a relative difference exceeds 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.layouts.compare import BOUND, Difference, largest
from tools.layouts.matrix import LAYOUTS, METHODS, RECOMPUTE, SPECIAL, Case, full, oracle, quick
from tools.layouts.runs import make_models, run_cases

Row = tuple[Case, Difference]


def chosen_cases(argv: Sequence[str] | None) -> list[Case]:
    """What the command line asks for.

    Raises:
        SystemExit: an unknown layout, method or kind of recomputation, or nothing left.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a pairwise covering instead of all combinations")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="only these")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS | SPECIAL), default=list(METHODS | SPECIAL), help="only these")
    parser.add_argument("--recompute", nargs="+", choices=list(RECOMPUTE), default=list(RECOMPUTE), help="only these")
    options = parser.parse_args(argv)
    cases = [
        case
        for case in (quick() if options.quick else full())
        if case.layout in options.layouts and case.method in options.methods and case.recompute in options.recompute
    ]
    if not cases:
        parser.error("--quick has none of these combinations; leave it out")
    return cases


def measured(cases: Sequence[Case]) -> Iterator[Row]:
    """Each case with its largest difference from one process; layout by layout, as they are done."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder)
        expected = run_cases(folder, [oracle(case.method) for case in cases])
        for layout in LAYOUTS:  # processes of their own: Megatron closes no group that it opened
            mine = [case for case in cases if case.layout == layout]
            if mine:
                yield from compared(mine, expected, run_cases(folder, mine))


def compared(cases: Sequence[Case], expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Row]:
    """Each case with its largest difference, in the order of the methods."""
    for case in sorted(cases, key=lambda c: c.method):
        yield case, largest(expected[oracle(case.method).name], found[case.name])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    cases = chosen_cases(argv)
    line = "{:<14} {:<18} {:<11} {:>10}  {}"
    print(line.format("layout", "method", "recompute", "largest", "of"))
    sizes = []
    for case, difference in measured(cases):
        mark = "" if difference.size <= BOUND else "   ABOVE THE BOUND"
        found = line.format(str(case.layout), case.method, case.recompute, f"{difference.size:.1e}", difference.quantity)
        print(found + mark, flush=True)
        sizes.append(difference.size)
    print(f"{len(sizes)} combinations, largest {max(sizes):.1e}, bound {BOUND:.0e}")
    return int(not all(size <= BOUND for size in sizes))


if __name__ == "__main__":
    sys.exit(main())
