"""Run one stage of a script, and write down how long it took and how large its largest process became.

usage: python tools/stage.py FILE.jsonl NAME COMMAND...
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path


def run_stage(file: Path, name: str, command: list[str]) -> int:
    """Runs the command, appends {"name", "seconds", "gib"} to `file` where it succeeds, and returns its exit code."""
    print(f"\n== {name}", flush=True)
    began = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        # Of all descendants that were waited for, in KiB.
        gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        with file.open("a") as out:
            out.write(json.dumps({"name": name, "seconds": round(time.monotonic() - began, 1), "gib": round(gib, 2)}) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(run_stage(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
