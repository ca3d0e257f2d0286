"""`megatron-rl methods`: the registry as tables for people or JSON for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .fields import default_of, field_docs, type_text
from .methods import describe
from .methods.catalog import METHODS
from .methods.objective import Kind, Method

KINDS: tuple[Kind, ...] = get_args(Kind)
WEAK = "bold yellow"
"""The colour of tags and labels that say "not the paper's formula" or "not read in the paper"."""


def sorted_methods() -> list[Method]:
    """Every method: objectives first, then the other kinds, by name."""
    return sorted(METHODS.values(), key=lambda m: (KINDS.index(m.kind), m.name))


def method_record(method: Method) -> dict[str, Any]:
    """What a method declares, with its parameters, in JSON's types."""
    defaults = method.config()
    needs = method.needs(defaults) if callable(method.needs) else method.needs
    docs, hints = field_docs(method.config), get_type_hints(method.config)
    return {
        "name": method.name,
        "kind": method.kind,
        "unit": method.unit,
        "paper": method.paper,
        "evidence": method.evidence,
        "evidence_words": describe.evidence_words(method),
        "label": describe.label(method),
        "summary": method.summary,
        "configured_in": describe.config_field(method),
        "aggregation": method.aggregation if method.kind == "objective" else None,
        "needs": sorted(needs),
        "params": [
            {"name": f.name, "type": type_text(hints[f.name]), "default": default_of(f), "doc": docs[f.name]} for f in fields(method.config)
        ],
    }


def print_methods(*, as_json: bool) -> None:
    """Every method, objectives first."""
    methods = sorted_methods()
    if as_json:
        sys.stdout.write(json.dumps([method_record(m) for m in methods], indent=1) + "\n")
        return
    console = _console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for column in ("name", "kind", "unit", "paper", "tags"):
        # A blog's title is cut here and whole in `show`, so that the summary keeps its room.
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=16 if console.width < 120 else 30)
    table.add_column("summary", ratio=1)
    for method in methods:
        table.add_row(method.name, method.kind, method.unit, method.paper, _tags(method.evidence), _summary(method))
    console.print(table)
    console.print()
    for tag, words in describe.EVIDENCE.items():
        console.print(Text.assemble(_tags(tag), f"  {words}"))
    console.print("\nmegatron-rl methods show NAME prints formula, parameters and caveats of one.")


def print_method(name: str, *, as_json: bool) -> None:
    """One method in full.

    Raises:
        ValueError: there is no such method; lists those that there are.
    """
    if name not in METHODS:
        raise ValueError(f"method: {name!r} is unknown; choose one of: {', '.join(sorted(METHODS))}")
    method = METHODS[name]
    record = method_record(method)
    if as_json:
        sys.stdout.write(json.dumps(record | {"text": describe.formula(method).strip()}, indent=1) + "\n")
        return
    console = _console()
    console.print(Text.assemble((name, "bold"), f" ({method.kind}, per {method.unit}): ", _summary(method)))
    console.print()
    for text, is_prose in describe.paragraphs(method):
        console.print(Text(text, "" if is_prose else "cyan"), "", sep="\n")
    console.print(_facts(record))
    console.print()
    if not record["params"]:
        console.print("no parameters")
        return
    table = Table("parameter", "type", "default", "meaning", box=None, header_style="bold", pad_edge=False)
    for param in record["params"]:
        table.add_row(param["name"], param["type"], json.dumps(param["default"]), Text(param["doc"]))
    console.print(table)


def _facts(record: dict[str, Any]) -> Table:
    """What is not a parameter, one line a fact."""
    table = Table.grid(padding=(0, 2))
    table.add_row("paper", record["paper"])
    for i, (tag, words) in enumerate(record["evidence_words"].items()):
        table.add_row("" if i else "evidence", Text.assemble(_tags(tag), f" {words}"))
    table.add_row("configured in", record["configured_in"])
    if record["aggregation"]:
        table.add_row("aggregation", record["aggregation"])
    table.add_row("needs", ", ".join(record["needs"]) or "nothing beyond the behaviour log-probs")
    return table


def _tags(evidence: str) -> Text:
    """The tags, the weak ones in colour."""
    return Text.assemble(*((tag, WEAK if tag in "AIN" else "green") for tag in evidence))


def _summary(method: Method) -> Text:
    """The line, led by the label of a formula that is not the paper's own."""
    label = describe.label(method)
    return Text.assemble((f"{label}: ", WEAK), method.summary) if label else Text(method.summary)


def _console() -> Console:
    """A pipe gets lines wide enough not to be folded."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
