"""How a test runs a script on several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tools.layouts.launch import LAST, ROOT, LaunchError, environment


def run_ranks(worker: str, *args: str, processes: int, timeout: float = 240) -> str:
    """Runs tests/dist/workers/<worker> on `processes` gloo ranks; returns its output, fails with it if a rank fails."""
    try:
        return run_forked(ROOT / "tests/dist/workers" / worker, *args, processes=processes, timeout=timeout)
    except LaunchError as error:
        raise AssertionError(str(error)) from None


def run_forked(script: Path, *args: str, processes: int, timeout: float) -> str:
    """As `tools.layouts.launch.torchrun`, on ranks forked from a process that has imported all they need (forks.py).

    Raises:
        LaunchError: a rank failed, or time was up; no rank is left behind.
    """
    host = _host()
    assert host.stdin is not None and host.stdout is not None
    with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as output:
        job = {"argv": [str(script), *args], "processes": processes, "timeout": timeout, "output": output.name}
        host.stdin.write(json.dumps(job) + "\n")
        host.stdin.flush()
        answer = host.stdout.readline()
        said = output.read()
    if not answer:
        raise LaunchError(f"forks.py ended with {host.wait()} during {script.name}:\n{said[-LAST:]}")
    problem = json.loads(answer)["problem"]
    if problem is not None:
        raise LaunchError(f"{script.name}: {problem}:\n{said[-LAST:]}")
    return said


@cache
def _host() -> subprocess.Popen[str]:
    """The process that forks; it ends when this one does, for its stdin ends then."""
    command = [sys.executable, str(ROOT / "tests/dist/forks.py")]
    return subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
