"""Sampled tokens a second of a local fleet, collected as the training loop does: prompts x samples, log-probs and routes on.

usage: python tools/bench/rollout.py --model runs/quickstart/warm --data runs/quickstart/data/train.jsonl [--servers 2]
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

from megatron_rl.config import DataConfig, ModelConfig, RolloutConfig
from megatron_rl.data.prompts import PromptSource, load_tokenizer
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\nusage")[0])
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--data", required=True, help="jsonl with prompts and answers")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    source = PromptSource(DataConfig(source="jsonl", path=args.data, max_prompt_tokens=32), load_tokenizer(args.model), 0, split="train")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.dtype}")
    for servers in args.servers:
        config = RolloutConfig(dtype=args.dtype, launch=servers, max_running_requests=args.prompts * args.samples // servers)
        with (
            tempfile.TemporaryDirectory() as logs,
            Fleet.start(config, ModelConfig(path=args.model), routes=True, log_dir=Path(logs), context_length=64) as fleet,
        ):
            rates = []
            for step in range(WARM_UP + args.repeats):
                began = time.perf_counter()
                answers = collect(
                    fleet, source.batch(step, args.prompts), samples=args.samples, sampling=Sampling(1.0, 32), routes=True, version=None
                )
                rates.append(sum(a.response_tokens for a in answers) / (time.perf_counter() - began))
            print(f"{servers} servers: {min(rates[WARM_UP:]):.0f} - {max(rates[WARM_UP:]):.0f} tokens/s")


if __name__ == "__main__":
    main()
