"""Servers that are wrong, die, or outlive their owner: what the user sees, and that nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import ModelConfig, RolloutConfig
from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet
from tests.engine.test_rollout import make_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has its children ignore it
from pathlib import Path
from megatron_rl.config import ModelConfig, RolloutConfig
from megatron_rl.rollout.fleet import serve
model, log_dir = ModelConfig(path=sys.argv[1]), Path(sys.argv[2])
serve(RolloutConfig(dtype="float32"), model, routes=True, log_dir=log_dir, announce=print, context_length=64)
"""


@pytest.fixture(scope="module")
def doomed(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server of our own without --enable-return-routed-experts, which the last test of this module ends."""
    model = ModelConfig(path=str(tiny_moe))
    with Fleet.start(RolloutConfig(dtype="float32"), model, routes=False, log_dir=tmp_path_factory.mktemp("doomed")) as fleet:
        yield fleet


def test_server_without_routes_is_refused(doomed: Fleet, tiny_moe: Path) -> None:
    message = "does not return routed experts, which replay.mode R3 needs; start it with --enable-return-routed-experts"
    with pytest.raises(ValueError, match=message):
        Fleet.connect(doomed.urls, doomed.config, ModelConfig(path=str(tiny_moe)), routes=True)


def test_port_in_use(doomed: Fleet, tiny_moe: Path, tmp_path: Path) -> None:
    port = int(doomed.urls[0].rsplit(":", 1)[1])
    with pytest.raises(ValueError, match=rf"rollout.base_port: {port} cannot be used on 127.0.0.1: Address already in use"):
        Fleet.start(RolloutConfig(base_port=port), ModelConfig(path=str(tiny_moe)), routes=True, log_dir=tmp_path)


def test_server_that_cannot_start_shows_its_log(tiny_moe: Path, tmp_path: Path) -> None:
    config = RolloutConfig(dtype="float32", extra_args=("--no-such-flag",))
    with pytest.raises(EngineError, match=r"the server ended \(exit code 2\); last lines of (.|\n)*--no-such-flag"):
        Fleet.start(config, ModelConfig(path=str(tiny_moe)), routes=True, log_dir=tmp_path)


def test_engine_that_dies_while_sampling(doomed: Fleet) -> None:
    """The request would take a minute; the process is killed a second after it is out."""
    server = doomed.engines[0].server
    assert server is not None
    future = doomed.start_soon(kill_later, server.process.pid)
    start = time.monotonic()
    with pytest.raises(EngineError) as caught:
        collect(doomed, make_prompts(4), samples=16, sampling=Sampling(1.0, 4000), routes=False, version=0)
    assert time.monotonic() - start < 30
    future.result()
    pattern = rf"{doomed.urls[0]}: the server ended \(killed by SIGKILL\); last lines of {re.escape(str(server.log))}:\n    .*"
    assert re.match(pattern, str(caught.value)), str(caught.value)


async def kill_later(pid: int) -> None:
    import asyncio

    await asyncio.sleep(1.0)
    os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_its_owner(tiny_moe: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C and the worst case, once the server has its children: then every process of it is there."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tiny_moe), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = psutil.Process(owner.pid)
    try:
        # the server, its scheduler and its detokenizer
        wait_for(lambda: len(process.children(recursive=True)) >= 3 or owner.poll() is not None, 180, "the server has its children")
        family = process.children(recursive=True)
        assert owner.poll() is None, owner.stderr.read().decode() if owner.stderr else ""
        owner.send_signal(how)
        owner.wait(90)  # however busy the machine is
        wait_for(lambda: not running(family), 15, "every process of the server is gone")
    finally:
        for child in running(process.children(recursive=True) if process.is_running() else []):
            child.kill()
        owner.kill()
        owner.wait()
