"""No process of a server outlives the one it serves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.5


def die_with_spawner() -> None:
    """Have the kernel kill this process when the process that spawned it ends. Linux only; elsewhere nothing.

    SGLang does this too, but only once its imports are done; a launcher killed while it starts would leave children behind.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Kill this process, by which its children die, within a second of the end of process ``parent``.

    Not by prctl: the kernel would also signal when merely the thread that started us ended, as a thread pool's may.

    Args:
        parent: ``os.getppid()``, read as early as possible.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that ``finally`` blocks run, until SGLang installs handlers of its own."""

    def leave(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)
