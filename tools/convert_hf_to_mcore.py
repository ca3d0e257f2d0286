#!/usr/bin/env python
"""Hugging Face folder -> Megatron distributed checkpoint.

python tools/convert_hf_to_mcore.py models/tiny checkpoints/tiny
torchrun --nproc-per-node 8 tools/convert_hf_to_mcore.py models/Qwen3-30B-A3B checkpoints/qwen3 --parallel.tensor 2 --parallel.expert 8
"""

from jsonargparse import auto_cli

from megatron_rl.convert.commands import hf_to_mcore

if __name__ == "__main__":
    auto_cli(hf_to_mcore)
