"""torchrun from Python: a script on so many gloo ranks of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAST = 6000
"""Characters of output that a failure shows."""


class LaunchError(RuntimeError):
    """A rank failed, or the ranks ran too long; the message ends with what they printed last."""


def environment(path: str | Path | None = None) -> dict[str, str]:
    """Of ranks: a thread each, this checkout on the module path, and `path` before it."""
    paths = [str(path) if path else None, str(ROOT), os.environ.get("PYTHONPATH")]
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, paths)))


def torchrun(script: Path, *args: str, processes: int, timeout: float, path: str | Path | None = None) -> str:
    """Runs script on `processes` ranks and returns their output.

    Args:
        timeout: seconds.
        path: a folder to put first on the module path (an overlay with another megatron-core).

    Raises:
        LaunchError: a rank failed, or time was up; no rank is left behind.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script), *args]
    process = subprocess.Popen(
        command, env=environment(path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise LaunchError(f"{script.name} ran past {timeout} s:\n{output[-LAST:]}") from None
    except BaseException:  # an interrupted caller leaves no ranks behind
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise LaunchError(f"{script.name} failed:\n{output[-LAST:]}")
    return output
