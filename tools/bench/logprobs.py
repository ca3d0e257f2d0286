#!/usr/bin/env python
"""Peak memory and time of log-prob + entropy, forward and backward, from hidden states: this package against other ways.

    python tools/bench/logprobs.py                                    # T = 8,192, V = 151,936, fp32 and bf16
    python tools/bench/logprobs.py --tokens 1024 --contenders naive ours --chunk 256 1024
    bash tools/peer_env.sh && .peer/bin/python tools/bench/logprobs.py   # against verl and TRL too

Contenders: naive ([T, V] log_softmax), verl (FusedLinearForPPO) and trl (ChunkedLogProbFunction), each as its package calls it, where
it is installed, and ours. Each line is a process of its own. Peak: what its resident memory grew by beyond the inputs, gradients of hidden
states and weight included (their size is the last column). Contenders that would not fit into free memory are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

PACKAGES = {"verl": "verl", "trl": "trl"}
TRL_COLUMNS = 32_768
"""_CHUNKED_LOGPROB_CHUNK_SIZE in trl/trainer/utils.py, 1.16.0."""
ALL = ["naive", "verl", "trl", "ours"]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--contenders", nargs="+", default=ALL, choices=ALL)
    parser.add_argument("--chunk", nargs="+", type=int, default=[256], help="of ours")
    parser.add_argument("--no-entropy", action="store_true", help="log-probs alone (verl computes the entropy anyway)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a process of its own: measure this line and print it
    return parser.parse_args()


Statistics = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(hidden [T, H], weight [V, H], labels [T]) -> (log-probs [T], entropies [T] or None)."""


def naive(line: dict[str, Any]) -> Statistics:
    """What one would write down; fp32 after the projection."""

    def statistics(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
        log_p = (hidden @ weight.T).float().log_softmax(-1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) if line["entropy"] else None

    return statistics


def verl(line: dict[str, Any]) -> Statistics:
    """verl's fused kernel in torch, its own chunk."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO()


def trl(line: dict[str, Any]) -> Statistics:
    """TRL's chunked function, with the vocabulary chunk of its trainers."""
    from trl.kernels import ChunkedLogProbFunction

    outputs = ("entropy",) if line["entropy"] else ()
    return lambda hidden, weight, labels: ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, TRL_COLUMNS, None, 1.0, outputs)[
        :2
    ]


def ours(line: dict[str, Any]) -> Statistics:
    """megatron_rl.actor.logprobs, without the package's __init__: that imports Megatron, which the peers' environment lacks."""
    package = ModuleType("actor_files")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "megatron_rl" / "actor")]
    sys.modules[package.__name__] = package
    logprobs = importlib.import_module("actor_files.logprobs")

    def statistics(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
        shard = logprobs.VocabShard(0, line["vocabulary"], None)
        stats = logprobs.vocabulary_stats(hidden, weight, labels, shard, chunk=line["chunk"], entropy=line["entropy"])
        return stats.logp_T, stats.entropy_T

    return statistics


def peak_bytes() -> int:
    """Of this process, since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(line: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward after a small one."""
    import torch

    torch.set_num_threads(line["threads"])
    statistics = {"naive": naive, "verl": verl, "trl": trl, "ours": ours}[line["contender"]](line)
    dtype = getattr(torch, line["dtype"])
    generator = torch.Generator().manual_seed(0)
    tokens, vocabulary, hidden_size = line["tokens"], line["vocabulary"], line["hidden"]
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = torch.empty(vocabulary, hidden_size, dtype=dtype)
    for part in weight.split(4096):  # in parts: the peak before the measurement must not hide the measurement's own
        part.copy_(torch.randn(part.shape, generator=generator) * hidden_size**-0.5)
    weight.requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)

    def step(hidden: Any, weight: Any, labels: Any) -> None:
        logp, entropy = statistics(hidden, weight, labels)
        loss = logp.sum() if not line["entropy"] else (logp + 0.01 * entropy.float()).sum()
        torch.autograd.grad(loss, (hidden, weight))

    step(hidden[:4], weight[:64], labels[:4] % 64)  # first calls import and allocate
    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    step(hidden, weight, labels)
    return {
        **line,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": (peak_bytes() - before) / 1e6,
        "gradients_mb": (hidden.nbytes + weight.nbytes) / 1e6,
    }


def lines(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be measured."""
    out = []
    for tokens in options.tokens:
        for dtype in options.dtype:
            for contender in options.contenders:
                for chunk in options.chunk if contender == "ours" else [None]:
                    out.append({"tokens": tokens, "dtype": dtype, "contender": contender, "chunk": chunk})
    shared = {"vocabulary": options.vocabulary, "hidden": options.hidden, "entropy": not options.no_entropy, "threads": options.threads}
    return [{**line, **shared} for line in out]


def obstacle(line: dict[str, Any]) -> str | None:
    """Why a line cannot be measured here."""
    package = PACKAGES.get(line["contender"])
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed: tools/peer_env.sh"
    needed = 7 * 4 * line["tokens"] * line["vocabulary"] if line["contender"] == "naive" else 0
    if needed > psutil.virtual_memory().available:
        return f"would take about {needed / 1e9:.0f} GB"
    return None


def show(line: dict[str, Any]) -> str:
    """A row of the table."""
    name = line["contender"] + (f" chunk {line['chunk']}" if line["chunk"] else "")
    head = f"{line['tokens']:>7} {line['dtype']:<9} {name:<16}"
    if "skipped" in line:
        return f"{head} {line['skipped']}"
    return f"{head} {line['peak_mb']:>9.0f} {line['seconds']:>8.1f} {line['cpu_seconds']:>8.1f} {line['gradients_mb']:>10.0f}"


def main() -> None:
    """Measure and print."""
    options = parse()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    if not options.json:
        print(f"V {options.vocabulary}, H {options.hidden}, {options.threads} thread(s), entropy {'no' if options.no_entropy else 'yes'}")
        print(f"{'T':>7} {'dtype':<9} {'contender':<16} {'peak MB':>9} {'seconds':>8} {'cpu s':>8} {'gradients':>10}")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    for line in lines(options):
        reason = obstacle(line)
        if reason:
            result = {**line, "skipped": reason}
        else:
            child = subprocess.run(
                [sys.executable, __file__, "--one", json.dumps(line)], env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            result = json.loads(child.stdout.splitlines()[-1])
        print(json.dumps(result) if options.json else show(result), flush=True)


if __name__ == "__main__":
    main()
