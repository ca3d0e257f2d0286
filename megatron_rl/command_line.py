"""From arguments and YAML files to a `Config`, and from jsonargparse's complaints to one line that names field, value and remedy."""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from .config import Config

Tree = TypeVar("Tree", bound=Any)

USAGE_OF_CONFIG = "[--config FILE.yaml]... [--SECTION.FIELD VALUE]... [--print_config]"
HELP_OF_CONFIG = "YAML files and options are merged from left to right; later ones win. --print_config shows the result."


class UserError(ValueError):
    """A mistake of whoever started the command; its message is all they need to see."""


def new_parser(prog: str, description: str, usage: str | None = None) -> ArgumentParser:
    """A parser that raises instead of exiting, and shows the text below each field in its help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return ArgumentParser(prog=prog, description=description, usage=usage, exit_on_error=False)


def config_parser(prog: str, description: str, cls: type = Config) -> ArgumentParser:
    """A parser with every field of `cls` as --section.field, --config and --print_config. Imports no torch."""
    parser = new_parser(prog, f"{description} {HELP_OF_CONFIG}", f"{prog} {USAGE_OF_CONFIG}")
    parser.add_argument("--config", action="config", metavar="FILE.yaml", help="Any part of the tree; may be given several times.")
    parser.add_class_arguments(cls, None, as_group=True)
    return parser


def parse(parser: ArgumentParser, arguments: Sequence[str], cls: type = Config) -> Namespace:
    """The parsed arguments, dataclasses built.

    Args:
        cls: the tree whose keys an unknown one is compared with.

    Raises:
        UserError: an unknown key, a value of a wrong type, or one that a dataclass refuses.
        SystemExit: 0 after --help or --print_config.
    """
    try:
        return parser.instantiate(parser.parse_args(list(arguments)))
    except ArgumentError as error:
        raise UserError(explain(str(error), parser.prog, cls)) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_config(prog: str, description: str, arguments: Sequence[str]) -> Config:
    """The `Config` that arguments and the files they name ask for. Raises as `parse`."""
    return parse_into(Config, prog, description, arguments)


def parse_into(cls: type[Tree], prog: str, description: str, arguments: Sequence[str]) -> Tree:
    """As `parse_config`, for another tree of dataclasses."""
    values = parse(config_parser(prog, description, cls), arguments, cls)
    return cls(**{field.name: values[field.name] for field in fields(cls)})


def explain(message: str, prog: str, cls: type = Config) -> str:
    """jsonargparse's message on one line: what is wrong first, then the remedy."""
    line = " ".join(message.split())
    remedy = f"see {prog} --help"
    key = _unknown_key(line)
    if key is not None:
        near = difflib.get_close_matches(key, list(config_keys(cls)), n=1)
        return f"{key}: there is no such key; " + (f"did you mean {near[0]}?" if near else remedy)
    wrong = re.fullmatch(r'Parser key "([^"]+)": (.*)', line)
    if wrong is None:
        return f"{line}; {remedy}"
    name, reason = wrong.groups()
    inner = re.search(r"Option '([^']+)' is not accepted", reason)
    if inner is not None:
        return f"{name}: an entry has the key {inner[1]!r}, which does not exist; {remedy}"
    bare = re.fullmatch(r"Expected a dot import path string: (.*)", reason)
    if bare is not None:
        return f"{name}: {bare[1]!r} is no entry; write {{name: {bare[1]}}}"
    value = re.fullmatch(r"Expected an? (.+)\. Got value: (.*)", reason)
    if value is None:
        return f"{name}: {reason}; {remedy}"
    return f"{name}: {value[2]!r} does not fit; use {_readable(value[1])}"


def _readable(kind: str) -> str:
    """A type as jsonargparse prints it, in the words of --help: choices instead of Literal, names instead of classes."""
    kind = re.sub(r"<class '([^']+)'>", r"\1", kind).replace("typing.", "")
    return re.sub(r"Literal\[([^]]*)\]", lambda found: "one of " + found[1].replace("'", ""), kind)


def _unknown_key(line: str) -> str | None:
    found = re.search(r"[Uu]nrecognized arguments: (?:--)?([^\s=+]+)", line)
    if found is not None:
        return found[1]
    found = re.search(r"Group '([^']+)' does not accept option '([^']+)'", line)
    if found is not None:
        return f"{found[1]}.{found[2]}"
    found = re.match(r"Option '([^']+)' is not accepted", line)
    return found[1] if found is not None else None


def config_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the tree, sections included."""
    for field in fields(cls):
        name = f"{prefix}{field.name}"
        yield name
        if is_dataclass(field.default):
            yield from config_keys(type(field.default), f"{name}.")
