"""Run by test_convert_faults.py: says how much memory conversions take on top of the process, then converts until it is killed.

usage: conversion_child.py FOLDER        prints one JSON line: bytes of the largest tensor, of the model, and of each conversion's peak
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.convert.commands import hf_to_mcore, mcore_to_hf
from megatron_rl.convert.families import QWEN3_MOE
from megatron_rl.convert.hf import HfReader, HfWriter
from megatron_rl.convert.reshard import reshard

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "dtype": "float32",
}
"""The embedding has 4 MiB, an expert 3, the model 83."""


def make(folder: Path) -> None:
    """The checkpoint, in files of 32 MiB."""
    template = folder.with_name("template")
    template.mkdir()
    (template / "config.json").write_text(json.dumps(CONFIG))
    shape = QWEN3_MOE.shape(CONFIG)
    with HfWriter(folder, template, shard_bytes=32 << 20) as writer:
        for number, slot in enumerate(QWEN3_MOE.slots(shape)):
            for name, size in zip(slot.hf_names, slot.hf_shapes(shape), strict=True):
                writer.add(name, torch.full(size, 1.0 + number))


def status(field: str) -> int:
    """Bytes, from /proc."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


def peak(work: Callable[[], Any]) -> int:
    """The most memory that the process had during `work`, above what it had before."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def main() -> None:
    folder = Path(sys.argv[1])
    model = folder / "model"
    make(model)
    found = {
        "largest": CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4,
        "total": HfReader(model).total_bytes(),
        "hf_to_mcore": peak(lambda: hf_to_mcore(str(model), str(folder / "mcore"))),
        "mcore_to_hf": peak(lambda: mcore_to_hf(str(folder / "mcore"), str(folder / "hf"), str(model))),
        "reshard": peak(lambda: reshard(str(folder / "mcore"), str(folder / "resharded"))),
    }
    print(json.dumps(found), flush=True)
    hf_to_mcore(str(model), str(folder / "out"), file_bytes=1 << 20)


if __name__ == "__main__":
    main()
