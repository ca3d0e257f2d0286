#!/usr/bin/env python
"""Megatron distributed checkpoint -> Hugging Face folder, with config.json and tokenizer from a folder of the same model.

python tools/convert_mcore_to_hf.py runs/quickstart/checkpoints exported/tiny models/tiny
torchrun --nproc-per-node 8 tools/convert_mcore_to_hf.py runs/qwen3/checkpoints exported/qwen3 models/Qwen3-30B-A3B --parallel.expert 8
"""

from jsonargparse import auto_cli

from megatron_rl.convert.commands import mcore_to_hf

if __name__ == "__main__":
    auto_cli(mcore_to_hf)
