"""A child process that scores one answer at a time and is replaced when it takes too long."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT = 120.0
"""Seconds for a worker to import its package; sympy from a cold disk takes a while."""


class WorkerProcess:
    """Runs `worker.py`; safe to share between threads, which take turns.

    A plain process with a pipe, not multiprocessing: neither fork (a trainer holds threads and sockets) nor a second import of
    the main module, and no signal, so it works from any thread.
    """

    def __init__(self, options: Mapping[str, Any], timeout: float, *, package: str, extra: str) -> None:
        """Starts the worker and waits until it has imported what it needs.

        Args:
            options: {"kind": a key of worker.SCORERS, ...its parameters}.
            timeout: seconds one answer may take.
            package: what the scorer needs, for the message when it is missing.
            extra: the pip extra of megatron-rl that brings it.

        Raises:
            ValueError: the package is missing or the parameters do not suit.
        """
        self._options = dict(options)
        self._timeout = timeout
        self._package, self._extra = package, extra
        self._lock = threading.Lock()
        self._start()

    def score(self, text: str, prompt: Mapping[str, Any]) -> float | None:
        """The score, or None when it took longer than the time limit (the worker is then killed and started anew).

        Raises:
            ValueError: the worker cannot use the prompt's reference answer.
            RuntimeError: the checker itself failed, or its process died.
        """
        with self._lock:
            try:
                self._connection.send((text, dict(prompt)))
                if not self._connection.poll(self._timeout):
                    self._stop()
                    self._start()
                    return None
                kind, value = self._connection.recv()
            except (EOFError, OSError) as gone:
                code = self._process.wait()
                raise RuntimeError(f"the {self._package} process died with exit code {code} while it scored {text[:200]!r}") from gone
        if kind == "invalid":
            raise ValueError(str(value))
        if kind == "failed":
            raise RuntimeError(f"{self._package} failed on {text[:200]!r}:\n{value}")
        return float(value)

    def close(self) -> None:
        """Ends the worker."""
        with self._lock:
            self._stop()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # -P: the worker's own folder must not shadow packages.
        command = [sys.executable, "-P", str(WORKER), json.dumps(self._options), str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        try:
            if not self._connection.poll(START_TIMEOUT):
                self._stop()
                raise RuntimeError(f"the {self._package} process did not start within {START_TIMEOUT:.0f} s")
            kind, value = self._connection.recv()
        except EOFError as gone:
            raise RuntimeError(f"the {self._package} process died at start with exit code {self._process.wait()}") from gone
        if kind == "ready":
            return
        self._stop()
        if kind == "missing":
            raise ValueError(f"reward.verifier: needs {self._package} ({value}); install it with pip install 'megatron-rl[{self._extra}]'")
        raise ValueError(f"reward.verifier: {self._package} refuses its parameters: {value}")

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
