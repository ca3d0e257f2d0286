"""Local SGLang servers: started, waited for, and never left behind.

A server is started through `megatron_rl_patches.sglang.launch_server`, which runs SGLang with or without CUDA and ends when its
parent ends, however that happens. It gets a session of its own, so that Ctrl-C reaches this process first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.ports import free_ports, refusal
from megatron_rl.rollout.client import EngineClient, EngineError, EngineUnreachable

TAIL_LINES = 25
STOP_GRACE = 5.0
"""Seconds a server gets to end by itself."""
CPU_CACHE_TOKENS = 65_536
"""Largest key-value cache the launcher asks for on CPU, where SGLang cannot measure free memory for itself."""


@dataclass
class LocalServer:
    """A server this process started."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def died(self) -> str | None:
        """Why it is gone, with its last log lines; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.url}: the server ended ({how}); last lines of {self.log}:\n{log_tail(self.log)}"

    def stop(self) -> None:
        """Ends the server and every process it started; returns when they are gone."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):  # the group is killed below either way
                self.process.wait(STOP_GRACE)
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented."""
    with path.open(errors="replace") as file:
        return "".join(f"    {line.rstrip()[:300]}\n" for line in deque(file, maxlen=lines))


def choose_ports(config: RolloutConfig) -> list[int]:
    """A port for each server: consecutive ones from base_port, or free ones.

    Raises:
        ValueError: a port of rollout.base_port's range is in use, or no port can be had.
    """
    if config.base_port is None:
        ports = free_ports(config.host, config.launch)
        if len(ports) < config.launch:
            raise ValueError(f"rollout.host: nothing can listen on {config.host}; give an address of this machine")
        return ports
    ports = list(range(config.base_port, config.base_port + config.launch))
    for port in ports:
        why = refusal(config.host, port)
        if why is not None:
            raise ValueError(
                f"rollout.base_port: {port} cannot be used on {config.host}: {why}; end what listens there, choose another port, "
                "or null for a free one"
            )
    return ports


@dataclass(frozen=True)
class ServerSpec:
    """What the launcher must know beyond RolloutConfig."""

    model_path: str
    routes: bool
    context_length: int
    """Tokens of the longest prompt and answer together."""
    weight_version: int = 0
    seed: int = 0


def server_arguments(config: RolloutConfig, spec: ServerSpec, index: int, port: int, *, cuda: bool) -> list[str]:
    """SGLang's command-line arguments for server `index` of the fleet; `rollout.extra_args` come last, so they win."""
    arguments = [
        *("--model-path", spec.model_path, "--host", config.host, "--port", str(port), "--dtype", config.dtype),
        *("--tp-size", str(config.tensor), "--max-running-requests", str(config.max_running_requests)),
        *("--context-length", str(spec.context_length), "--weight-version", str(spec.weight_version)),
        *("--random-seed", str(spec.seed + index), "--skip-server-warmup", "--log-level-http", "warning"),
    ]
    if spec.routes:
        arguments.append("--enable-return-routed-experts")
    if config.keep_sets:
        # tokens tied at the cut-off stay, so a set may be larger; every step copies as many ids as this from the device, used or not
        arguments += ["--sampling-mask-max-tokens", str(2 * config.keep_sets)]
    arguments += _cuda_arguments(config, index) if cuda else _cpu_arguments(config, spec)
    return [*arguments, *config.extra_args]


def _cuda_arguments(config: RolloutConfig, index: int) -> list[str]:
    arguments = ["--base-gpu-id", str(index * config.tensor)]
    for flag, value in (
        ("--attention-backend", config.attention_backend),
        ("--max-total-tokens", config.max_total_tokens),
        ("--mem-fraction-static", config.mem_fraction),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    return arguments


def _cpu_arguments(config: RolloutConfig, spec: ServerSpec) -> list[str]:
    """Overlap scheduling and CUDA graphs need CUDA; an idle server must leave its core to the trainer."""
    cache = config.max_total_tokens or min(CPU_CACHE_TOKENS, config.max_running_requests * (spec.context_length + 1))
    return [
        *("--device", "cpu", "--attention-backend", config.attention_backend or "torch_batched", "--sampling-backend", "pytorch"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"),
        *("--max-total-tokens", str(max(cache, spec.context_length + 1)), "--chunked-prefill-size", "2048"),
    ]


def _child_environment(environment: Mapping[str, str], cuda: bool) -> dict[str, str]:
    """This process's, without what torchrun tells its ranks: the server is no rank of the trainer."""
    torchrun = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    child = {k: v for k, v in environment.items() if k not in torchrun and not k.startswith("TORCHELASTIC_")}
    child["HF_HUB_OFFLINE"] = "1"  # the model is a folder; a look at the hub would only delay the start
    if not cuda:
        child["OMP_NUM_THREADS"] = "1"
    return child


def launch(config: RolloutConfig, spec: ServerSpec, log_dir: Path) -> list[LocalServer]:
    """Starts `config.launch` servers without waiting for them; their output goes to `log_dir`/server_<i>.log.

    Raises:
        ValueError: a port is in use.
    """
    cuda = torch.cuda.is_available()
    log_dir.mkdir(parents=True, exist_ok=True)
    servers: list[LocalServer] = []
    for index, port in enumerate(choose_ports(config)):
        log = log_dir / f"server_{index}.log"
        command = [sys.executable, "-m", "megatron_rl_patches.sglang.launch_server", "--die-with-parent"]
        command += server_arguments(config, spec, index, port, cuda=cuda)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_child_environment(os.environ, cuda),
                start_new_session=True,
            )
        servers.append(LocalServer(f"http://{config.host}:{port}", log, process))
    return servers


async def wait_until_ready(server: LocalServer, client: EngineClient, timeout: float) -> None:
    """Returns once /model_info answers, with the server's start-up objects taken out of garbage collection.

    SGLang asks itself to /freeze_gc after its warm-up; with --skip-server-warmup it asks before it listens, and fails. On CPU every
    flush then walks all that it ever imported: half a second.

    Raises:
        EngineError: the server ended, or `timeout` seconds passed; with its last log lines.
    """
    deadline = time.monotonic() + timeout
    while True:
        reason = server.died()
        if reason is not None:
            raise EngineError(reason)
        try:
            await client.request("GET", "/model_info", timeout=5.0)
            break
        except EngineUnreachable:
            pass  # not listening yet
        if time.monotonic() > deadline:
            raise EngineError(
                f"{server.url}: no answer within rollout.start_timeout = {timeout:g} s; last lines of {server.log}:\n{log_tail(server.log)}"
            )
        await asyncio.sleep(0.2)
    await client.request("POST", "/freeze_gc", timeout=max(5.0, deadline - time.monotonic()))


def stop_all(servers: Sequence[LocalServer]) -> None:
    """Ends every server: all are told first, so that they end at the same time."""
    for server in servers:
        if server.process.poll() is None:
            server.process.terminate()
    for server in servers:
        server.stop()
