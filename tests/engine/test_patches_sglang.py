"""``--attention-backend torch_batched`` against SGLang's own torch_native, on real servers, in fp32.

Both servers hold the same checkpoint and prefill in chunks of 128 tokens. 1e-5 is ten times the spread that two summation orders
give in fp32 here, and far below what one wrong key or mask costs (a token dropped from a context of 100 moves log-probs by 1e-3).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tools.make_tiny_moe import TinyModel, make_tiny_moe

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang: see patches/requirements-sglang-cpu.txt"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU attention backend is not registered where there is CUDA"),
]

TOLERANCE = 1e-5
CHUNK = 128
BACKENDS = ("torch_native", "torch_batched")
START_SECONDS = 300.0
"""A start takes 15 s on an idle core; a busy machine may take much longer."""

# Starts its arguments as a process, prints the pid, and stays: what a trainer is to its server.
STARTER = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(10_000)"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


class Server:
    """A server with a parent of its own that can be killed."""

    def __init__(self, backend: str, model: Path, log: Path) -> None:
        self.port = _free_port()
        self.log = log
        options = f"""
            --host 127.0.0.1 --port {self.port} --device cpu --dtype float32 --attention-backend {backend} --sampling-backend pytorch
            --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup --sleep-on-idle --enable-return-routed-experts
            --max-total-tokens 16384 --max-running-requests 32 --chunked-prefill-size {CHUNK} --die-with-parent"""
        command = [sys.executable, "-m", "megatron_rl_patches.sglang.launch_server", "--model-path", str(model), *options.split()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as sink:
            starter = [sys.executable, "-c", STARTER, *command]
            self.parent = subprocess.Popen(starter, stdout=subprocess.PIPE, stderr=sink, env=environment, text=True)
        assert self.parent.stdout is not None
        self.launcher = psutil.Process(int(self.parent.stdout.readline()))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.launcher.is_running() and self.launcher.status() != psutil.STATUS_ZOMBIE:
            try:
                _call(self.port, "/model_info")
            except OSError:
                time.sleep(0.2)
            else:
                return
        pytest.fail(f"no server after {START_SECONDS:.0f} s:\n" + self.log.read_text()[-3000:])

    def processes(self) -> list[psutil.Process]:
        return [self.launcher, *self.launcher.children(recursive=True)]


def _survivors(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after at most ``seconds``; a zombie has ended and only waits for its parent."""
    deadline = time.monotonic() + seconds
    while True:
        running = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("patches-sglang")
    # Twice the usual spread of weights: sharper attention, so that a mistake in it shows.
    model = make_tiny_moe(folder / "model", TinyModel(init=0.1))
    started = {backend: Server(backend, model, folder / f"{backend}.log") for backend in BACKENDS}
    try:
        for server in started.values():
            server.wait_until_ready()
        yield started
    finally:
        for server in started.values():
            server.parent.kill()
            server.parent.wait()
            for process in _survivors(server.processes() if server.launcher.is_running() else [], seconds=5):
                process.kill()


def _tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _generate(server: Server, prompts: list[list[int]], new_tokens: int, logprob_start: int = -1) -> list[dict[str, Any]]:
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": logprob_start,
        "return_routed_experts": True,
    }
    return list(_call(server.port, "/generate", body))


def _logprobs(reply: dict[str, Any]) -> torch.Tensor:
    """Of the prompt as far as it was asked for (its first entry is null) and of the answer."""
    meta = reply["meta_info"]
    pairs = [*(meta["input_token_logprobs"] or []), *meta["output_token_logprobs"]]
    return torch.tensor([pair[0] for pair in pairs if pair[0] is not None], dtype=torch.float64)


def _compare(servers: dict[str, Server], prompts: list[list[int]], new_tokens: int, logprob_start: int = -1) -> list[dict[str, Any]]:
    """Both servers must give the same tokens, routes and log-probs; returns torch_batched's replies."""
    native, batched = (_generate(servers[backend], prompts, new_tokens, logprob_start) for backend in BACKENDS)
    for ours, theirs in zip(batched, native, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["meta_info"]["routed_experts"] == theirs["meta_info"]["routed_experts"]
        torch.testing.assert_close(_logprobs(ours), _logprobs(theirs), rtol=0, atol=TOLERANCE)
    return batched


def test_the_servers_run_what_they_were_asked_to(servers: dict[str, Server]) -> None:
    for backend, server in servers.items():
        assert _call(server.port, "/server_info")["attention_backend"] == backend


def test_the_servers_processes_are_forked(servers: dict[str, Server]) -> None:
    """Scheduler and detokenizer; spawning would show as a third child, Python's resource tracker."""
    for server in servers.values():
        assert len(server.launcher.children(recursive=True)) == 2


def test_greedy_answers_to_ragged_prompts(servers: dict[str, Server]) -> None:
    """Lengths on both sides of the backend's groups (16 new tokens, 128 cached), decoded together across the edge at 128."""
    lengths = [1, 2, 15, 16, 17, 60, 100, 118, 127]
    replies = _compare(servers, [_tokens(length, seed=length) for length in lengths], new_tokens=24)
    assert [len(_logprobs(reply)) for reply in replies] == [24] * len(lengths)


def test_teacher_forced_prompts_in_chunks(servers: dict[str, Server]) -> None:
    """600 tokens are five chunks, the later ones behind a cached prefix; log-probs of every prompt token are compared."""
    lengths = [600, 3, 200]
    replies = _compare(servers, [_tokens(length, seed=1000 + length) for length in lengths], new_tokens=2, logprob_start=0)
    assert [len(_logprobs(reply)) for reply in replies] == [length - 1 + 2 for length in lengths]


def test_prefix_cache_hits(servers: dict[str, Server]) -> None:
    """A prompt seen before, continued by different amounts: few new tokens behind a long prefix, next to a fresh prompt."""
    prefix = _tokens(150, seed=7)
    _compare(servers, [prefix], new_tokens=4)
    prompts = [prefix + _tokens(extra, seed=70 + extra) for extra in (1, 5, 40)]
    replies = _compare(servers, [*prompts, _tokens(20, seed=8)], new_tokens=12)
    cached = [reply["meta_info"]["cached_tokens"] for reply in replies]
    assert all(count >= len(prefix) - 1 for count in cached[:3])
    assert cached[3] == 0


def test_no_process_outlives_its_parent(servers: dict[str, Server]) -> None:
    """Last, because it ends both: SIGTERM to one launcher, and SIGKILL to the parent of the other, busy one."""
    polite, orphaned = (servers[backend] for backend in BACKENDS)
    ending, dying = polite.processes(), orphaned.processes()
    assert len(ending) >= 3 <= len(dying)  # launcher, scheduler, detokenizer
    polite.launcher.send_signal(signal.SIGTERM)
    orphaned.parent.kill()
    assert _survivors(dying, seconds=10) == []
    assert _survivors(ending, seconds=30) == []
