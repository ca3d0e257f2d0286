#!/usr/bin/env python
"""Check that every model family converts exactly and computes what transformers computes, under every kind of layout.

A tiny random model of each family, made by transformers, goes through Megatron and back; then both score the same packed tokens in
fp32 and take gradients. Exit status 1 where a tensor changed, a logit is off by more than 2e-5, or a gradient by more than 1e-4 of its
tensor's largest:

    python tools/check_families.py
    python tools/check_families.py --family deepseek-v3 --json
    python tools/check_families.py --quick                        # one process, and tensor with expert parallelism
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, only tools/ is on the path

from tools.families.tiny import TINY, make_tiny
from tools.layouts.launch import LaunchError, torchrun

WORKER = Path(__file__).parent / "families" / "through_megatron.py"
TOLERANCE = 2e-5
"""fp32 sums in another order; logits are of order 1."""
GRADIENT_TOLERANCE = 1e-4
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "EP2": (2, {"expert": 2}),
    "PP2": (2, {"pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2}),
    "TP2 PP2 EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "TP2 EP2 ETP2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
}
"""Processes and the `parallel` section of the configuration."""
QUICK = ("1", "TP2 EP2")
DENSE = ("qwen3", "qwen2", "llama", "llama3")
"""Have no experts to divide."""
BIASED_EXPERTS = ("gpt-oss",)
"""Megatron cannot divide an expert that has biases, and without expert parallelism tensor parallelism would."""


@dataclass(frozen=True)
class Row:
    """One family under one layout."""

    family: str
    layout: str
    exact: bool
    """Whether every tensor came back bit for bit, none missing and none added."""
    max_logit_diff: float
    max_gradient_diff: float
    different: tuple[str, ...] = ()
    """Tensors that did not."""

    @property
    def passed(self) -> bool:
        """Whether it is as it has to be."""
        return self.exact and self.max_logit_diff <= TOLERANCE and self.max_gradient_diff <= GRADIENT_TOLERANCE


def cases(families: Sequence[str], layouts: Sequence[str]) -> list[tuple[str, str]]:
    """(family, layout), but for those that divide what a family does not have or Megatron cannot divide."""
    found = []
    for family in families:
        for layout in layouts:
            parallel = LAYOUTS[layout][1]
            if family in DENSE and "expert" in parallel:
                layout = "TP2"
            expert_tensor = parallel.get("expert_tensor", 1 if "expert" in parallel else parallel.get("tensor", 1))
            if (family, layout) not in found and not (family in BIASED_EXPERTS and expert_tensor > 1):
                found.append((family, layout))
    return found


def check(wanted: Sequence[tuple[str, str]], folder: Path, *, timeout: float = 900) -> list[Row]:
    """Makes the checkpoints in `folder` and checks them, with one start of torchrun for each number of processes.

    Raises:
        LaunchError: a worker failed.
    """
    for family in dict.fromkeys(family for family, _ in wanted):
        make_tiny(family, folder / family)
    rows: dict[tuple[str, str], Row] = {}
    for processes in sorted({LAYOUTS[layout][0] for _, layout in wanted}):
        mine = [case for case in wanted if LAYOUTS[case[1]][0] == processes]
        out = folder / f"{processes}.json"
        arguments = json.dumps([[family, LAYOUTS[layout][1]] for family, layout in mine])
        torchrun(WORKER, str(folder), str(out), arguments, processes=processes, timeout=timeout)
        for case, result in zip(mine, json.loads(out.read_text()), strict=True):
            rows[case] = Row(*case, exact=not result["different"], **{**result, "different": tuple(result["different"])})
    return [rows[case] for case in wanted]


def report(row: Row) -> dict[str, Any]:
    """The row as JSON, with names of tensors only where some differ."""
    return {name: value for name, value in asdict(row).items() if name != "different" or value}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only the layouts {' and '.join(QUICK)}")
    parser.add_argument("--family", action="append", choices=sorted(TINY), help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    options = parse(argv)
    wanted = cases(options.family or list(TINY), QUICK if options.quick else list(LAYOUTS))
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = check(wanted, Path(folder))
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps([report(row) for row in rows], indent=2))
    for row in () if options.json else rows:
        print(
            f"{row.family:<20} {row.layout:<12} {'exact' if row.exact else 'NOT EXACT':<10} "
            f"max |dlogit| {row.max_logit_diff:.1e}  max |dgradient| {row.max_gradient_diff:.1e}"
        )
        print("".join(f"    {name}\n" for name in row.different[:8]), end="")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
