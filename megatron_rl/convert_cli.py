"""`megatron-rl convert`: the commands that read and write checkpoints. Importing the package itself would import Megatron."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from .subcommands import PROG, Command, Runner, dispatch, summary

if TYPE_CHECKING:
    from jsonargparse import Namespace


DESCRIPTION = (
    "Checkpoints between Hugging Face and Megatron, in any layout. Whole models only: adapters (LoRA) are neither read nor written; merge "
    "them first. Block-scaled FP8 is read and written out plain; other quantised weights are refused by name."
)


def main(arguments: Sequence[str]) -> int:
    """Runs the sub-command that the first argument names."""
    return dispatch("convert", COMMANDS, arguments, DESCRIPTION)


def hf_to_mcore(arguments: Sequence[str]) -> int:
    """Write a Megatron distributed checkpoint of a Hugging Face folder; large models under torchrun."""
    places = {
        "folder": "Hugging Face folder: config.json and safetensors.",
        "out": "New folder; training resumes from it as <logging.dir>/checkpoints.",
    }
    values = _conversion("hf-to-mcore", hf_to_mcore, places, arguments)
    from .convert import commands

    commands.hf_to_mcore(values.folder, values.out, values.parallel, values.dtype, values.file_bytes)
    return 0


def mcore_to_hf(arguments: Sequence[str]) -> int:
    """Write a Hugging Face folder from a Megatron distributed checkpoint; large models under torchrun."""
    places = {
        "checkpoint": "A step_* folder, or the folder of several, of which the newest whole one is taken.",
        "out": "New folder.",
        "hf_template": "Hugging Face folder of the same model, for config.json and tokenizer.",
    }
    values = _conversion("mcore-to-hf", mcore_to_hf, places, arguments)
    from .convert import commands

    commands.mcore_to_hf(values.checkpoint, values.out, values.hf_template, values.parallel, values.dtype, values.file_bytes)
    return 0


def reshard(arguments: Sequence[str]) -> int:
    """Write a Megatron checkpoint again as ranks of another layout would, with its optimizer state; large models under torchrun."""
    from .command_line import new_parser, parse
    from .config import ParallelConfig
    from .preflight import check_ranks

    parser = new_parser(f"{PROG} convert reshard", summary(reshard))
    parser.add_argument("checkpoint", type=str, help="A step_* folder, or the folder of several, of which the newest whole one is taken.")
    parser.add_argument("out", type=str, help="New folder; the checkpoint keeps its step's name in it.")
    parser.add_argument("--hf_template", type=str | None, default=None, help="Holds config.json, for a checkpoint that has none.")
    parser.add_argument("--weights_only", type=bool, default=False, help="Leave optimizer state out.")
    parser.add_class_arguments(ParallelConfig, "parallel")
    values = parse(parser, arguments)
    check_ranks(values.parallel, ["convert", "reshard", *arguments], os.environ)
    from .convert.reshard import reshard as run

    run(values.checkpoint, values.out, values.parallel, values.hf_template, weights_only=values.weights_only)
    return 0


def inspect(arguments: Sequence[str]) -> int:
    """Say what is in a Hugging Face folder or a Megatron checkpoint, after checking that it is whole."""
    parser = argparse.ArgumentParser(prog=f"{PROG} convert inspect", description=summary(inspect))
    parser.add_argument("place", metavar="FOLDER|CHECKPOINT")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    options = parser.parse_args(arguments)
    from .convert.inspection import describe
    from .convert.mcore_inspection import describe_checkpoint
    from .convert.session import is_checkpoint
    from .convert.words import description

    found = describe_checkpoint(options.place) if is_checkpoint(Path(options.place)) else describe(options.place)
    print(json.dumps(asdict(found)) if options.json else description(found))
    return 0


def verify(arguments: Sequence[str]) -> int:
    """Compare two checkpoints of either kind: every tensor, then logits and routes on prompts. Exits 1 when they differ."""
    parser = argparse.ArgumentParser(prog=f"{PROG} convert verify", description=summary(verify))
    parser.add_argument("a", metavar="A", help="Hugging Face folder, answered for by transformers, or Megatron checkpoint, by Megatron")
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--prompts", metavar="FILE", help='JSON lines, {"prompt": text} or {"tokens": [ids]}; without, tensors only')
    parser.add_argument("--hf_template", metavar="FOLDER", help="holds config.json, for a checkpoint that has none")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for prompts of text, where neither A nor B has one")
    parser.add_argument("--bound", type=float, help="largest |difference of a logit| / largest |logit|, in fp32 (default 1e-4)")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines: every position, every tensor that differs")
    options = parser.parse_args(arguments)
    from .convert.verify import BOUND
    from .convert.verify import verify as run
    from .convert.words import verification

    bound = BOUND if options.bound is None else options.bound
    report = run(options.a, options.b, options.prompts, hf_template=options.hf_template, tokenizer=options.tokenizer, bound=bound)
    print(json.dumps(report.as_dict()) if options.json else verification(report))
    return 0 if report.passed else 1


def _conversion(name: str, function: Runner, places: dict[str, str], arguments: Sequence[str]) -> Namespace:
    """The parsed arguments of a conversion: `places` in order, dtype and parallel; the layout fits the ranks."""
    from .command_line import new_parser, parse
    from .config import Dtype, ParallelConfig
    from .preflight import check_ranks

    parser = new_parser(f"{PROG} convert {name}", summary(function))
    for place, text in places.items():
        parser.add_argument(place, type=str, help=text)
    parser.add_argument("--dtype", type=Dtype | None, default=None, help="Of the written tensors; null keeps what config.json says.")
    parser.add_argument(
        "--file_bytes", type=int, default=1 << 30, help="Largest file; an interrupted conversion goes on with the next one."
    )
    parser.add_class_arguments(ParallelConfig, "parallel")
    values = parse(parser, arguments)
    check_ranks(values.parallel, ["convert", name, *arguments], os.environ)
    return values


def upcycle(arguments: Sequence[str]) -> int:
    """Write a mixture of experts that starts where a dense Llama or Qwen2 ended."""
    from .command_line import UserError, new_parser, parse
    from .convert.experts import Upcycling

    parser = new_parser(f"{PROG} convert upcycle", summary(upcycle))
    parser.add_argument("dense", type=str, help="Hugging Face folder of the dense model.")
    parser.add_argument("out", type=str, help="New folder.")
    parser.add_class_arguments(Upcycling, None, as_group=True)
    values = parse(parser, arguments)
    try:
        options = Upcycling(**{field.name: values[field.name] for field in fields(Upcycling)})
    except ValueError as error:
        raise UserError(str(error)) from error
    from .convert.upcycle import upcycle as write

    write(values.dense, values.out, options)
    return 0


COMMANDS = {
    "hf-to-mcore": Command(hf_to_mcore, "Hugging Face folder to Megatron distributed checkpoint."),
    "mcore-to-hf": Command(mcore_to_hf, "Megatron distributed checkpoint to Hugging Face folder."),
    "inspect": Command(inspect, "Say what is in a checkpoint of either kind."),
    "verify": Command(verify, "Compare two checkpoints: tensors, logits, routes."),
    "reshard": Command(reshard, "Megatron checkpoint to another layout, with its optimizer."),
    "upcycle": Command(upcycle, "Dense Llama or Qwen2 to a mixture of experts."),
}
