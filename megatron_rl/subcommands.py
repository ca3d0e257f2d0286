"""Sub-commands: a table of names, what runs them, and their lines in the help. Imports nothing, so that help answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PROG = "megatron-rl"
Runner = Callable[[Sequence[str]], int]
"""The arguments after the command's name -> the exit code."""


@dataclass(frozen=True)
class Command:
    """A sub-command and its line in the help."""

    run: Runner
    help: str


def dispatch(name: str, commands: Mapping[str, Command], arguments: Sequence[str], description: str | None = None) -> int:
    """Runs the command that the first argument names; without one, or with --help, argparse has its say.

    Args:
        name: of the command that has these sub-commands; empty for the program itself.
    """
    if arguments and arguments[0] in commands:
        return commands[arguments[0]].run(arguments[1:])
    parser = argparse.ArgumentParser(prog=f"{PROG} {name}".strip(), description=description)
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for key, command in commands.items():
        choices.add_parser(key, help=command.help, add_help=False)
    parser.parse_args(arguments)
    raise AssertionError("argparse ends the process where no known command is named")


def summary(function: Runner) -> str:
    """The first paragraph of a runner's docstring: the description in its help."""
    return (function.__doc__ or "").split("\n\n")[0]
