"""What a page shows, as plain data: cards, figures and tables in sections."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["line", "faint", "points", "steps", "bars", "stack", "band"]
Format = Literal["number", "percent", "integer", "seconds", "text"]
NEUTRAL = -1
"""The palette's grey: floors, references, everything a curve is to be compared with."""


@dataclass(frozen=True)
class Series:
    """One curve, set of points or set of bars."""

    name: str
    x: Sequence[float] | Sequence[str]
    """Names make the axis one of categories."""
    y: Sequence[float | None]
    """None, and whatever is not finite, is a gap."""
    kind: Kind = "line"
    """steps: a histogram's outline, x at the bins' middles; stack: areas on each other; band: the area between low and high."""
    color: int = 0
    """Index into the page's palette, or NEUTRAL."""
    dashed: bool = False
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and how its numbers read."""

    label: str = ""
    format: Format = "number"
    log: bool = False
    zero: bool = False
    """Whether 0 is always in view."""


@dataclass(frozen=True)
class Figure:
    """One figure. `key` names its CSV and is unique on a page."""

    key: str
    title: str
    note: str
    """One or two sentences: what is seen, and how to read it."""
    series: Sequence[Series]
    x: Axis = field(default_factory=lambda: Axis("step", "integer"))
    y: Axis = field(default_factory=Axis)
    wide: bool = False
    rows: bool = False
    """Lies on its side, for long names: each a row, its points at their values; a line series is a rule across the rows."""

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """(columns, rows) of the figure's data: one row a point, low and high where a series has them."""
        banded = any(s.low or s.high for s in self.series)
        columns = ["series", slug(self.x.label) or "x", slug(self.y.label) or "value"]
        columns = [*columns, "low", "high"] if banded else columns
        rows: list[list[Any]] = []
        for s in self.series:
            gaps: list[float | None] = [None] * len(s.x)
            bounds = (list(s.low) or gaps, list(s.high) or gaps) if banded else ()
            rows += [[s.name, *values] for values in zip(s.x, s.y, *bounds, strict=True)]
        return columns, [[finite(value) for value in row] for row in rows]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    label: str
    format: Format = "number"
    note: str = ""
    """Shown when the pointer rests on the head."""


@dataclass(frozen=True)
class Table:
    """A table that the reader can sort. `key` names its CSV and is unique on a page."""

    key: str
    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    """Text, numbers, or None where there is none."""

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """(columns, rows) of the table's data."""
        return [slug(c.label) for c in self.columns], [[finite(value) for value in row] for row in self.rows]


@dataclass(frozen=True)
class Card:
    """One number in large type."""

    label: str
    value: str
    detail: str = ""
    tone: Literal["", "good", "bad"] = ""
    """Colours the detail."""


@dataclass(frozen=True)
class Section:
    """Figures and tables under one heading; a folded one opens on a click."""

    key: str
    title: str
    note: str
    items: Sequence[Figure | Table]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Listed at the end; nested mappings become dotted names."""
    lead: str = ""
    """What the page is about, in a sentence or two under the title."""


def finite(value: Any) -> Any:
    """The value, as Python's own type; None for a float that is not finite (JSON and CSV have none)."""
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def slug(text: str) -> str:
    """A name for files and columns: lower case, everything but letters and digits an underscore."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
