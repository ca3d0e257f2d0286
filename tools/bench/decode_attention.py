#!/usr/bin/env python
"""Generated tokens a second of SGLang on a CPU: its own attention backend against torch_batched.

    python tools/bench/decode_attention.py                       # makes the quickstart's model, one server after the other
    python tools/bench/decode_attention.py --model runs/tiny --batch 128 --json

Log-probs and routed experts are on, as in training. Two rates: by the clock, which a busy machine lowers, and by the CPU time of
SGLang's scheduler process, which it hardly does. Median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 300.0
CACHE_TOKENS = 32_768


@dataclass(frozen=True)
class Rate:
    """One line of the table."""

    backend: str
    batch: int
    tokens_per_second: float
    tokens_per_cpu_second: float
    load_average: float
    """Of the machine over the last minute, at the end of the measurement; the benchmark itself contributes about 1."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: a new tiny Qwen3-MoE")
    parser.add_argument("--backend", nargs="+", default=["torch_native", "torch_batched"])
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 64, 128], help="requests at a time")
    parser.add_argument("--new-tokens", type=int, default=64, help="per request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of the server")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args(argv)


def machine() -> dict[str, Any]:
    """Processor, its cores, and what else ran when the benchmark began."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def make_model(folder: Path) -> Path:
    """The quickstart's model, from the tool next door."""
    tool = Path(__file__).resolve().parents[1] / "make_tiny_moe.py"
    subprocess.run([sys.executable, str(tool), "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


@contextmanager
def running_server(backend: str, model: Path, requests: int, threads: int, log: Path) -> Iterator[tuple[int, psutil.Process]]:
    """A server for the length of the block; yields its port and its scheduler process.

    Raises:
        RuntimeError: it did not start; the end of its log is in the message.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "megatron_rl_patches.sglang.launch_server", "--die-with-parent", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32", "--attention-backend", backend]
    command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup"]
    command += ["--max-total-tokens", str(CACHE_TOKENS), "--chunked-prefill-size", "2048", "--max-running-requests", str(requests)]
    command += ["--enable-return-routed-experts", "--sleep-on-idle", "--log-level", "warning"]
    with log.open("w") as sink:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_ready(port, process, log)
        yield port, next(child for child in psutil.Process(process.pid).children() if "scheduler" in "".join(child.cmdline()))
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers; RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            call(port, "/model_info")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server did not start (exit status {process.poll()}); its log ends:\n{log.read_text()[-3000:]}")


def measure(port: int, scheduler: psutil.Process, batch: int, new_tokens: int, seed: int) -> tuple[float, float]:
    """Generate once for ``batch`` random prompts of 6 to 16 tokens: tokens a second, and tokens a CPU-second of the scheduler."""
    rng = random.Random(seed)
    body = {
        "input_ids": [[rng.randrange(3, 250) for _ in range(rng.randint(6, 16))] for _ in range(batch)],
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    cpu, clock = sum(scheduler.cpu_times()[:2]), time.perf_counter()
    replies = call(port, "/generate", body)
    elapsed, used = time.perf_counter() - clock, sum(scheduler.cpu_times()[:2]) - cpu
    tokens = sum(len(reply["output_ids"]) for reply in replies)
    return tokens / elapsed, tokens / used


def bench(options: argparse.Namespace, folder: Path) -> list[Rate]:
    """Every backend with every batch size, one server at a time."""
    model = options.model or make_model(folder / "model")
    rates = []
    for backend in options.backend:
        with running_server(backend, model, max(options.batch), options.threads, folder / f"{backend}.log") as (port, scheduler):
            measure(port, scheduler, 8, 8, seed=0)  # first calls allocate and import
            for batch in options.batch:
                runs = [measure(port, scheduler, batch, options.new_tokens, seed=1 + i) for i in range(options.repeats)]
                clock, cpu = (statistics.median(values) for values in zip(*runs, strict=True))
                rates.append(Rate(backend, batch, clock, cpu, os.getloadavg()[0]))
    return rates


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    options = parse(argv)
    about = {**machine(), "threads": options.threads, "new_tokens": options.new_tokens, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as folder:
        rates = bench(options, Path(folder))
    if options.json:
        print(json.dumps({"machine": about, "rates": [asdict(rate) for rate in rates]}, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'backend':<15} {'batch':>5} {'tokens/s':>9} {'tokens/cpu-s':>13} {'load':>6}")
    for rate in rates:
        numbers = f"{rate.tokens_per_second:>9.0f} {rate.tokens_per_cpu_second:>13.0f} {rate.load_average:>6.1f}"
        print(f"{rate.backend:<15} {rate.batch:>5} {numbers}")


if __name__ == "__main__":
    main()
