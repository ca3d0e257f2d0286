"""What each method would do to this batch."""

from __future__ import annotations

from typing import Any

from ...page.figure import Column, Section, Table
from .view import View

COLUMNS = (
    Column("Method", "text"),
    Column("Kind", "text"),
    Column("Unit", "text", "Over what its ratio or decision runs"),
    Column("Tokens kept", "percent", "Loss tokens with a weight other than 0"),
    Column("Sequences kept whole", "percent", "Sequences none of whose tokens is dropped"),
    Column("Mean weight"),
    Column("Largest weight"),
    Column("Effective tokens", "percent", "(Σ|w|)² / (n Σw²): 100 % where all count alike"),
    Column("Effective sequences", "percent", "The same over the mean weights of sequences"),
    Column("Not shown for want of", "text"),
)
NUMBERS = ("kept_tokens", "kept_sequences", "mean_weight", "max_weight", "effective_tokens", "effective_sequences")


def methods(view: View, names: list[str]) -> list[Section]:
    """A sortable table for each of the conditions."""
    if not names:
        return []
    note = (
        "Every method at its default parameters, alone, on these very tokens. An objective is read through its gradient: its weight on a "
        "token is what it multiplies the advantage by, 0 where it clips or masks."
    )
    return [Section(view.key("methods"), "What each method would do to this batch", note, [_table(view, name) for name in names])]


def _table(view: View, name: str) -> Table:
    rows: list[list[Any]] = []
    for row in view.numbers["trained"][name]["methods"]:
        needs = ", ".join(need.replace("_", " ") for need in row.get("missing", ()))
        rows.append([row["method"], row["kind"], row["unit"], *(row.get(key) for key in NUMBERS), needs])
    note = "A click on a column's head sorts. Methods that keep nothing, or whose effective share is small, leave nothing to train on."
    return Table(view.key(f"methods {name}"), f"Acceptance, {name}", note, COLUMNS, rows)
