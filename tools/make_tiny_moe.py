"""Make a tiny random Qwen3-MoE (or dense Qwen3) checkpoint in Hugging Face format, with a real tokenizer.

    python tools/make_tiny_moe.py --out runs/tiny            # the quickstart's 1.1 M parameters
    python tools/make_tiny_moe.py --out runs/deep --layers 16

The experts stand in the file one by one (`model.layers.0.mlp.experts.0.gate_proj.weight`), as in Qwen's own checkpoints.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from megatron_rl.lab.tiny import EOS_ID, TinyModel, build_model, build_tokenizer, make_tiny_moe

__all__ = ["EOS_ID", "TinyModel", "build_model", "build_tokenizer", "make_tiny_moe"]


def parse_args(argv: list[str] | None = None) -> tuple[Path, TinyModel]:
    """One option a field of TinyModel, and --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for field in fields(TinyModel):
        name = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    options = vars(parser.parse_args(argv))
    return options.pop("out"), TinyModel(**options)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    out, sizes = parse_args(argv)
    folder = make_tiny_moe(out, sizes)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{folder}: {'Qwen3' if sizes.dense else 'Qwen3-MoE'}, {size / 4e6:.2f} million parameters, seed {sizes.seed}")


if __name__ == "__main__":
    main()
