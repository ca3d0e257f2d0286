"""`megatron-rl`: thin commands. Each imports what it runs only when it runs, so that help answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .subcommands import PROG, Command, Runner, dispatch, summary

if TYPE_CHECKING:
    from .config import Config

_DESCRIPTION = "RL post-training of mixture-of-experts language models with Megatron-core and SGLang."


def train(arguments: Sequence[str]) -> int:
    """Train by reinforcement learning, under torchrun."""
    config = _checked("train", train, arguments)
    from . import loop

    loop.train(config)
    return 0


def sft(arguments: Sequence[str]) -> int:
    """Train by supervised learning on prompt and completion pairs, under torchrun."""
    config = _checked("sft", sft, arguments)
    from . import loop

    loop.sft(config)
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Sample held-out prompts from the newest checkpoint, or from model.path, and score the answers."""
    config = _checked("eval", evaluate, arguments)
    from . import loop

    loop.evaluate(config)
    return 0


def check(arguments: Sequence[str]) -> int:
    """Check a configuration as `train` would, for --ranks N ranks, and start nothing."""
    from .preflight import check_config, check_world, ranks_needed

    # Not part of the tree, so that --print_config prints what the other commands take.
    own = argparse.ArgumentParser(prog=f"{PROG} check", add_help=False, allow_abbrev=False)
    own.add_argument("--ranks", type=int)
    options, rest = own.parse_known_args(arguments)
    config = _config("check [--ranks N]", check, rest)
    ranks = options.ranks or ranks_needed(config.parallel)
    check_world(config, ranks)
    facts = check_config(config)
    p = config.parallel
    print(
        f"fits: {facts.architecture}, {facts.layers} layers, {facts.experts} experts on {ranks} ranks: tensor {p.tensor}, "
        f"pipeline {p.pipeline}, context {p.context}, expert {p.expert}, data {ranks // p.model_ranks}"
    )
    return 0


def rollout(arguments: Sequence[str]) -> int:
    """`serve`: launch SGLang servers on this machine and keep them until interrupted."""
    return dispatch("rollout", {"serve": Command(_serve, "Launch SGLang servers on this machine.")}, arguments)


def _serve(arguments: Sequence[str]) -> int:
    """Launch the SGLang servers of `rollout.launch` on this machine, print their URLs, and keep them until interrupted."""
    from .command_line import UserError
    from .preflight import check_config

    config = _config("rollout serve", _serve, arguments)
    if config.rollout.urls:
        raise UserError(f"rollout.urls: {list(config.rollout.urls)} run already; leave it empty to launch servers here")
    facts = check_config(config)
    from .rollout.fleet import serve

    serve(
        config.rollout,
        config.model,
        routes=facts.is_moe and (config.replay.mode == "R3" or config.replay.probe_every > 0),
        log_dir=Path(config.logging.dir) / "servers",
        announce=lambda url: print(url, flush=True),
        context_length=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
    )
    return 0


def convert(arguments: Sequence[str]) -> int:
    """Read, write, compare and convert checkpoints."""
    from .convert_cli import main

    return main(arguments)


def lab(arguments: Sequence[str]) -> int:
    """Measure, attribute, replay and show the mismatch between the engines."""
    from .lab.cli import main

    return main(arguments)


def methods(arguments: Sequence[str]) -> int:
    """List every method, or `show NAME` one with its parameters."""
    parser = argparse.ArgumentParser(prog=f"{PROG} methods", description=summary(methods))
    parser.add_argument("action", nargs="?", choices=["show"], help="show: one method in full")
    parser.add_argument("name", nargs="?", help="The method to show")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(arguments)
    if (options.action is None) != (options.name is None):
        parser.error("show needs the NAME of a method")
    from .listing import print_method, print_methods

    if options.name is None:
        print_methods(as_json=options.json)
    else:
        print_method(options.name, as_json=options.json)
    return 0


def report(arguments: Sequence[str]) -> int:
    """Write RUN_DIR/report.html from a run's metrics."""
    parser = argparse.ArgumentParser(prog=f"{PROG} report", description=summary(report))
    parser.add_argument("run_dir", metavar="RUN_DIR", help="The logging.dir of a run")
    options = parser.parse_args(arguments)
    from .telemetry.report import write_report

    print(write_report(options.run_dir))
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """Say what is installed and what would run; exits 1 with the remedy when something is missing."""
    parser = argparse.ArgumentParser(prog=f"{PROG} doctor", description=summary(doctor))
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument("--no-engine", action="store_true", help="Do not try to import SGLang, which takes half a minute on a CPU")
    options = parser.parse_args(arguments)
    from .doctor import diagnose, render

    diagnosis = diagnose(engine=not options.no_engine)
    print(diagnosis.as_json()) if options.json else render(diagnosis)
    return 0 if diagnosis.ok else 1


COMMANDS = {
    "train": Command(train, "Train by reinforcement learning, under torchrun."),
    "sft": Command(sft, "Train by supervised learning, under torchrun."),
    "eval": Command(evaluate, "Sample held-out prompts and score the answers."),
    "check": Command(check, "Check a configuration and start nothing."),
    "rollout": Command(rollout, "serve: launch SGLang servers on this machine."),
    "convert": Command(convert, "Read, write, compare and convert checkpoints."),
    "lab": Command(lab, "Measure and take apart the mismatch between the engines."),
    "methods": Command(methods, "List the methods, or show one."),
    "report": Command(report, "Write a run's report.html."),
    "doctor": Command(doctor, "Say what is installed and what would run."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for a user's mistake, 1 for what failed later, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron_rl").setLevel(logging.INFO)
    try:
        return dispatch("", COMMANDS, arguments, _DESCRIPTION)
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError) as error:
        if not _is_message(error):
            raise
        _tell(error)
        return 2 if isinstance(error, ValueError) else 1


def _config(name: str, function: Runner, arguments: Sequence[str]) -> Config:
    from .command_line import parse_config

    return parse_config(f"{PROG} {name}", summary(function), arguments)


def _checked(name: str, function: Runner, arguments: Sequence[str]) -> Config:
    """The configuration of a command that trains or evaluates, checked against the model and the ranks."""
    from .preflight import check_config, check_ranks, check_world, started_ranks

    config = _config(name, function, arguments)
    check_ranks(config.parallel, [name, *arguments], os.environ)
    check_world(config, started_ranks(os.environ), supervised=name == "sft")
    check_config(config, supervised=name == "sft")
    return config


def _is_message(error: Exception) -> bool:
    """Whether our own code raised it, for people to read. Of anything else a traceback says more."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return module.partition(".")[0] in ("megatron_rl", "megatron_rl_patches")


def _tell(error: Exception) -> None:
    """Prints the message. What every rank finds out before the start is said once, by rank 0."""
    from .command_line import UserError

    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or not isinstance(error, UserError):
        where = f" (rank {rank})" if rank else ""
        print(f"{PROG}: error{where}: {error}", file=sys.stderr, flush=True)
