"""Prefix scans of a packed micro-batch against torch.cumsum of the same length.

    python tools/bench/scans.py [--json]     # T = 1,000,000, sequences of 16,384 tokens, every fifth token a tool's

CPU time of one thread, fp32, the least of 31 runs: other work on the machine only adds. The vectorised form is the one that gradients
and GPUs take.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.methods.segments import LocalSegments


def milliseconds(run: Callable[[], Any], repeats: int = 31) -> float:
    """The least CPU time of a call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def measure(tokens: int, length: int) -> dict[str, float]:
    """Milliseconds of each scan."""
    generator = torch.Generator().manual_seed(0)
    sequence_T = torch.arange(tokens) // length
    mask_T = torch.rand(tokens, generator=generator) < 0.8
    x_T = torch.randn(tokens, generator=generator)
    segments = LocalSegments(sequence_T, mask_T, int(sequence_T[-1]) + 1)
    with_gradient_T = x_T.clone().requires_grad_()
    return {
        "torch.cumsum": milliseconds(lambda: x_T.cumsum(0)),
        "torch.cummin": milliseconds(lambda: x_T.cummin(0)),
        "prefix_sum": milliseconds(lambda: segments.prefix_sum(x_T)),
        "prefix_min_before": milliseconds(lambda: segments.prefix_min_before(x_T)),
        "prefix_sum, vectorised": milliseconds(lambda: segments.prefix_sum(with_gradient_T)),
        "prefix_min_before, vectorised": milliseconds(lambda: segments.prefix_min_before(with_gradient_T)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=16_384, help="of each sequence")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.tokens, options.length)
    if options.json:
        print(json.dumps({"tokens": options.tokens, "length": options.length, "ms": found}))
        return
    for name, ms in found.items():
        print(f"{name:<30} {ms:7.2f} ms {ms / found['torch.cumsum']:6.2f} x torch.cumsum")


if __name__ == "__main__":
    main()
