#!/usr/bin/env python
"""Check that every patch still finds the source lines it relies on, in the dependencies that are installed (or in given sources).

One line a patch; exit status 1 if a line is missing or a version was never tested. Run it before moving a pin:

    python tools/check_patches.py
    python tools/check_patches.py --json --root megatron-core=.overlays/megatron-core-0.19.2/megatron/core
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from megatron_rl_patches import megatron_core
from megatron_rl_patches.check import Report, check
from megatron_rl_patches.sglang import ledger as sglang_ledger

PATCHES = (*megatron_core.PATCHES, *sglang_ledger.PATCHES)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="DISTRIBUTION=FOLDER",
        help="read this package folder instead of the installed one; may be repeated",
    )
    return parser.parse_args(argv)


def parse_roots(pairs: list[str]) -> dict[str, Path]:
    """`["megatron-core=DIR"]` -> `{"megatron-core": Path("DIR")}`.

    Raises:
        ValueError: an unknown distribution, or no such folder.
    """
    known = {patch.dependency.distribution for patch in PATCHES}
    roots = {}
    for pair in pairs:
        distribution, equals, folder = pair.partition("=")
        if not equals or distribution not in known:
            raise ValueError(f"--root {pair}: no patches for {distribution!r}; name one of {', '.join(sorted(known))}, as NAME=FOLDER")
        if not Path(folder).is_dir():
            raise ValueError(f"--root {pair}: {folder!r} is not a folder; name the package folder, e.g. .../megatron/core")
        roots[distribution] = Path(folder)
    return roots


def line(report: Report) -> str:
    """`megatron-core 0.16.1  rng-fork  found`, and the anchors that are not there below it."""
    head = f"{report.dependency + ' ' + (report.version or '-'):<22} {report.patch:<24} {report.status}"
    return "\n".join([head, *(f"    not in {anchor}" for anchor in report.missing)])


def main(argv: list[str] | None = None) -> int:
    """Print the reports; 0 if all are well, 1 if a patch is not, 2 if the command line is wrong."""
    arguments = parse(argv)
    try:
        reports = check(PATCHES, parse_roots(arguments.root))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([{**dataclasses.asdict(report), "ok": report.ok} for report in reports], indent=1))
    else:
        print("\n".join(line(report) for report in reports))
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
