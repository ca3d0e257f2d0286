"""`megatron-rl lab`: the commands of the mismatch laboratory. Each imports what it runs only when it runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ..subcommands import PROG, Command, dispatch, summary


def main(arguments: Sequence[str]) -> int:
    """Runs the sub-command that the first argument names."""
    return dispatch("lab", COMMANDS, arguments, "Why the policy that samples is not quite the policy that trains.")


def measure(arguments: Sequence[str]) -> int:
    """Sample with SGLang, score the same tokens with the trainer under a grid of conditions, and write a report to --out."""
    from ..command_line import UserError, parse_into
    from ..preflight import check_ranks
    from .config import LabConfig

    own = argparse.ArgumentParser(prog=f"{PROG} lab measure", add_help=False, allow_abbrev=False)
    own.add_argument("--out", type=Path)
    options, rest = own.parse_known_args(arguments)
    config = parse_into(LabConfig, f"{PROG} lab measure", f"{summary(measure)} --out DIR names the folder.", rest)
    if options.out is None:
        raise UserError("--out: is missing; name the folder for measurement.json, summary.json and report.html")
    check_ranks(config.parallel, ["lab", "measure", *arguments], os.environ)
    from .measure import measure_and_report

    for file in measure_and_report(config, options.out, command=f"{PROG} lab measure {' '.join(arguments)}"):
        print(file)
    return 0


def replay(arguments: Sequence[str]) -> int:
    """Train again on what a run recorded, without servers: to the last bit, or with another method. Under torchrun, as `train`."""
    from ..command_line import UserError, parse_config
    from ..preflight import check_config, check_ranks, check_world, started_ranks
    from .replay import NO_DATA, plan, recorded_config

    # RUN is no option: torchrun would take --run for a short form of its own --run-path.
    run = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    own = argparse.ArgumentParser(prog=f"{PROG} lab replay", add_help=False, allow_abbrev=False)
    own.add_argument("--from_step", type=int, default=0)
    own.add_argument("--out", type=Path)
    options, rest = own.parse_known_args(arguments[1:] if run else arguments)
    description = (
        f"{summary(replay)} RUN: the logging.dir of the recorded run, whose configuration is taken. --from_step N: the first step "
        "to train again (0). --out DIR: where the replay writes (RUN/replay)."
    )
    if run is None:
        if not {"-h", "--help"} & set(rest):
            raise UserError("RUN: is missing; name the logging.dir of a run that recorded")
        recorded: list[str] = []
    else:
        recorded = ["--config", json.dumps(recorded_config(run)), "--record.enabled", "false"]
        rest = [*rest, *NO_DATA, "--logging.dir", str(options.out or run / "replay")]
    config = parse_config(f"{PROG} lab replay RUN [--from_step N] [--out DIR]", description, [*recorded, *rest])
    assert run is not None, "--help has ended the process"
    if Path(config.logging.dir).resolve() == run.resolve():
        raise UserError(f"--out: {config.logging.dir} is the recorded run itself; name another folder")
    check_ranks(config.parallel, ["lab", "replay", *arguments], os.environ)
    check_world(config, started_ranks(os.environ))
    check_config(config)
    offline = plan(run, options.from_step, config.train.steps)
    from .. import loop

    loop.train(config, offline)
    return 0


def report(arguments: Sequence[str]) -> int:
    """Write DIR/report.html again from a measurement; --run RUN adds the timeline of a training run."""
    parser = argparse.ArgumentParser(prog=f"{PROG} lab report", description=summary(report))
    parser.add_argument("folder", metavar="DIR", type=Path, help="The --out of `lab measure`")
    parser.add_argument("--run", type=Path, help="The logging.dir of the training run that the measurement belongs to")
    options = parser.parse_args(arguments)
    from .records import Measurement
    from .report import write_report
    from .summary import summarise

    measurement = Measurement.load(options.folder)
    print(write_report(measurement, summarise(measurement), options.folder, options.run))
    return 0


def watch(arguments: Sequence[str]) -> int:
    """Follow a run in the terminal until it ends: newest metrics, their course, and alarms."""
    parser = argparse.ArgumentParser(prog=f"{PROG} lab watch", description=summary(watch))
    parser.add_argument("run", metavar="RUN", type=Path, help="The logging.dir of a run, also before its first step")
    parser.add_argument("--once", action="store_true", help="Show what there is and exit: 1 with alarms, 0 without")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="Between looks at metrics.jsonl (default 2)")
    options = parser.parse_args(arguments)
    from .watch import watch as follow

    return follow(options.run, once=options.once, interval=options.interval)


def inspect(arguments: Sequence[str]) -> int:
    """Show one recorded answer token by token, coloured by what the trainer says less what the engine said."""
    parser = argparse.ArgumentParser(prog=f"{PROG} lab inspect", description=summary(inspect))
    parser.add_argument("run", metavar="RUN", type=Path, help="The logging.dir of a run that recorded")
    parser.add_argument("--step", type=int, default=0, help="Rollout step, from 0 (0)")
    parser.add_argument("--sample", type=int, default=0, help="Which of the step's answers, from 0 (0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write a page instead")
    parser.add_argument("--tokenizer", metavar="DIR", help="Folder of the tokenizer; the run's model.path otherwise, ids without any")
    options = parser.parse_args(arguments)
    from ..data.prompts import load_tokenizer
    from ..record.store import FOLDER, Store
    from .reading import plain_ids, read, token_texts

    store = Store(options.run / FOLDER)
    folder = options.tokenizer or store.about.config["model"]["path"]
    text_of = token_texts(load_tokenizer(folder)) if options.tokenizer or Path(folder).is_dir() else plain_ids
    reading = read(store, str(options.run), options.step, options.sample, text_of)
    if options.html is not None:
        from .inspect_html import write_html

        print(write_html(reading, options.html))
        return 0
    from rich.console import Console

    from .inspect_terminal import render

    render(reading, Console())
    return 0


COMMANDS = {
    "measure": Command(measure, "Sample, score under a grid of conditions, attribute, report."),
    "report": Command(report, "Write a measurement's report.html again."),
    "watch": Command(watch, "Follow a run in the terminal."),
    "inspect": Command(inspect, "Show one recorded answer token by token."),
    "replay": Command(replay, "Train again on what a run recorded, without servers."),
}
