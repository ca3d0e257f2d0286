"""`megatron-rl methods`: the registry as tables for people or JSON for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any, get_type_hints

from rich.console import Console
from rich.table import Table

from .fields import default_of, field_docs, type_text
from .methods.catalog import METHODS
from .methods.describe import formula
from .methods.objective import Method

KINDS = ("objective", "correction", "penalty")


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
        "summary": method.summary,
        "aggregation": method.aggregation if method.kind == "objective" else None,
        "needs": sorted(needs),
        "params": [
            {"name": f.name, "type": type_text(hints[f.name]), "default": default_of(f), "doc": docs[f.name]} for f in fields(method.config)
        ],
    }


def print_methods(*, as_json: bool) -> None:
    """Every method, objectives first."""
    records = [method_record(m) for kind in KINDS for m in sorted(METHODS.values(), key=lambda m: m.name) if m.kind == kind]
    if as_json:
        sys.stdout.write(json.dumps(records, indent=1) + "\n")
        return
    table = Table("name", "kind", "unit", "needs", "paper", "summary", box=None, header_style="bold")
    for record in records:
        needs = ", ".join(record["needs"])
        table.add_row(record["name"], record["kind"], record["unit"], needs, record["paper"], record["summary"])
    _console().print(table)


def print_method(name: str, *, as_json: bool) -> None:
    """One method in full.

    Raises:
        ValueError: there is no such method; lists those that there are.
    """
    if name not in METHODS:
        raise ValueError(f"method: {name!r} is unknown; choose one of: {', '.join(sorted(METHODS))}")
    record = method_record(METHODS[name])
    if as_json:
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return
    console = _console()
    console.print(f"[bold]{record['name']}[/] ({record['kind']}, per {record['unit']}): {record['summary']}")
    console.print(formula(METHODS[name]).strip(), style="dim", markup=False, highlight=False)
    console.print(f"paper {record['paper']} [dim]evidence {record['evidence']}[/]", highlight=False)
    if record["aggregation"]:
        console.print(f"aggregation {record['aggregation']}", highlight=False)
    console.print(f"needs {', '.join(record['needs']) or 'nothing beyond the behaviour log-probs'}", highlight=False)
    table = Table("parameter", "type", "default", "meaning", box=None, header_style="bold")
    for param in record["params"]:
        table.add_row(param["name"], param["type"], json.dumps(param["default"]), param["doc"])
    if record["params"]:
        console.print(table)
    else:
        console.print("no parameters")


def _console() -> Console:
    """A pipe gets lines wide enough not to be folded."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
