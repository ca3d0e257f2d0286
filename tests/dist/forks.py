"""Runs scripts on forked ranks: torch, Megatron and this package are imported once a test session, not once a rank.

usage: forks.py       one job a line on stdin, its end a line on stdout, both JSON; ends, with its ranks, when stdin does

A job is {"argv": [script, ...], "processes": n, "timeout": seconds, "output": file}. The ranks get the environment that torchrun gives
(what torchrun itself does is tested by tests/e2e), and write to the file. The answer is {"problem": null or what went wrong}.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
from typing import Any

from megatron_rl.ports import free_ports

IMPORTED = ("megatron_rl.lab.measure", "megatron_rl.convert.session", "tools.layouts.worker", "tools.families.through_megatron")
POLL_SECONDS = 0.02


def rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of one machine."""
    sizes = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_WORLD_SIZE": 1}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in (ranks | sizes).items()}


def become_rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Runs the script as this process's own; never returns."""
    os.setpgid(0, 0)
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(rank_environment(rank, job["processes"], port))
    sys.argv = job["argv"]
    sys.path.insert(0, os.path.dirname(job["argv"][0]))
    status = 1
    try:
        status = exit_status(job["argv"][0])
        atexit._run_exitfuncs()  # what the script left to be closed, and nothing of the parent's interpreter
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def exit_status(script: str) -> int:
    """Of the script, run in this process."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def run(job: dict[str, Any]) -> str | None:
    """Forks the ranks and waits for them; the first thing that went wrong. No rank is left behind."""
    (port,), ranks = free_ports("127.0.0.1", 1), {}
    for rank in range(job["processes"]):
        pid = os.fork()
        if pid == 0:
            become_rank(job, rank, port)
        ranks[pid] = rank
    deadline, problem = time.monotonic() + job["timeout"], None
    while ranks and problem is None:
        problem = over(deadline, job["timeout"])
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code, rank = os.waitstatus_to_exitcode(status), ranks.pop(pid)
                problem = problem or (f"rank {rank} ended with {code}" if code else None)
    for pid in ranks:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return problem


def over(deadline: float, timeout: float) -> str | None:
    """Waits a moment; why the ranks have to end now, if they have to."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    if readable:  # one job at a time: whoever asked for this one is gone
        return "the tests ended"
    return f"ran past {timeout} s" if time.monotonic() > deadline else None


def main() -> None:
    """Takes jobs until stdin ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        print(json.dumps({"problem": run(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
