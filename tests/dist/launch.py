"""How a test runs a worker under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(worker: str, *args: str, processes: int, timeout: float = 240, path: str | None = None) -> str:
    """Runs tests/dist/workers/<worker> on `processes` gloo ranks; returns its output, fails with it if a rank fails.

    Args:
        path: a folder to put first on the module path (an overlay with another megatron-core).
    """
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")])))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(ROOT / "tests/dist/workers" / worker), *args]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{worker} ran past {timeout} s:\n{output[-6000:]}") from None
    assert process.returncode == 0, f"{worker} failed:\n{output[-6000:]}"
    return output
