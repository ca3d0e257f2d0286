#!/usr/bin/env python
"""Conversion throughput against a plain copy of the same bytes: read every tensor with safetensors, write them again.

A synthetic Qwen3-MoE in bfloat16 (about 1 GB by default, experts of the size of Qwen3-30B-A3B's) is written under a temporary folder,
copied, converted to a Megatron checkpoint, and converted back from one, each `--rounds` times in turn. Everything that is written is
synced to the disk within its time, and removed before the next turn, so that each writes to memory that was just freed. Medians over
rounds; exit status 1 where a conversion reaches less than half of the copy's throughput:

    python tools/bench/convert.py
    python tools/bench/convert.py --layers 2 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only tools/bench is on the path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.convert.commands import hf_to_mcore, mcore_to_hf
from megatron_rl.convert.families import QWEN3_MOE
from megatron_rl.convert.hf import HfReader, HfWriter
from megatron_rl.convert.partial import sync

BOUND = 0.5
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 24,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}


def make_model(folder: Path, layers: int) -> int:
    """Writes the checkpoint; its weight files' bytes."""
    config = {**CONFIG, "num_hidden_layers": layers}
    template = folder.with_name("template")
    template.mkdir()
    (template / "config.json").write_text(json.dumps(config))
    shape = QWEN3_MOE.shape(config)
    pairs = [pair for slot in QWEN3_MOE.slots(shape) for pair in zip(slot.hf_names, slot.hf_shapes(shape), strict=True)]
    noise = torch.randn(1 << 26, generator=torch.Generator().manual_seed(1)).bfloat16()
    with HfWriter(folder, template) as writer:
        for number, (name, size) in enumerate(pairs):
            count = torch.Size(size).numel()
            start = number * 977 % (noise.numel() - count)
            writer.add(name, noise[start : start + count].view(size))
    return HfReader(folder).total_bytes()


def copy(folder: Path, out: Path) -> None:
    """Every tensor read by safetensors and written again, file by file."""
    out.mkdir()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            save_file({name: handle.get_tensor(name) for name in handle.keys()}, out / file.name)  # noqa: SIM118 (no mapping)
        sync(out / file.name)


def timed(work: Callable[[], Any]) -> float:
    """Wall seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(root: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Megabytes (1e6) a second of each way, and the conversions' shares of the copy's."""
    model, checkpoint, out = root / "model", root / "mcore", root / "out"
    size = make_model(model, layers)
    hf_to_mcore(str(model), str(checkpoint))
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: copy(model, out),
        "hf_to_mcore": lambda: hf_to_mcore(str(model), str(out)),
        "mcore_to_hf": lambda: mcore_to_hf(str(checkpoint), str(out), str(model)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            os.sync()  # what others wrote
            taken = timed(work)
            shutil.rmtree(out)
            if number:  # the first round warms caches up
                seconds[name].append(taken)
    rates = {name: size / 1e6 / statistics.median(taken) for name, taken in seconds.items()}
    result = {"bytes": size, "rounds": rounds, **{f"{name}_mb_s": round(rate, 1) for name, rate in rates.items()}}
    return result | {f"{name}_share": round(rates[name] / rates["copy"], 3) for name in ("hf_to_mcore", "mcore_to_hf")}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="227 MB each, on top of 134 MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary folder is made; three times the model's bytes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    options = parse(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        result = measure(Path(root), options.layers, options.rounds)
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{result['bytes'] / 1e6:.0f} MB of weights, median of {options.rounds} rounds")
        print(f"plain copy    {result['copy_mb_s']:8.1f} MB/s")
        for name in ("hf_to_mcore", "mcore_to_hf"):
            print(f"{name:<13} {result[f'{name}_mb_s']:8.1f} MB/s  {result[f'{name}_share']:.2f} of the copy")
    return 0 if min(result["hf_to_mcore_share"], result["mcore_to_hf_share"]) >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
