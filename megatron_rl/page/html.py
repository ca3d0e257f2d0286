"""A `Page` as one HTML file and a folder of CSV files."""

from __future__ import annotations

import csv
import html
import io
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..files import write_whole
from .figure import Figure, Page, Section, Table, finite
from .numbers import number, shown

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("scale.js", "marks.js", "chart.js", "rows.js", "page.js")
CSV_FOLDER = "csv"


def write_page(page: Page, out: Path) -> Path:
    """Writes the page to the file `out` and every figure's data to `csv/<key>.csv` beside it; returns `out`.

    A file appears whole or not at all.
    """
    texts = {item.key: to_csv(item) for section in page.sections for item in section.items}
    assert len(texts) == sum(len(s.items) for s in page.sections), "two figures have one key"
    folder = out.parent / CSV_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for key, text in texts.items():
        write_whole(folder / f"{key}.csv", text)
    write_whole(out, render(page))
    return out


def render(page: Page) -> str:
    """The page's HTML."""
    template = string.Template((ASSETS / "page.html").read_text(encoding="utf-8"))
    figures = {item.key: item for section in page.sections for item in section.items if isinstance(item, Figure)}
    return template.substitute(
        title=html.escape(page.title),
        subtitle=html.escape(page.subtitle),
        lead=f'<p class="lead">{html.escape(page.lead)}</p>' if page.lead else "",
        cards="".join(_lines("card", card.tone, label=card.label, value=card.value, detail=card.detail) for card in page.cards),
        columns=len(page.cards) if len(page.cards) <= 5 else (len(page.cards) + 1) // 2,
        contents="".join(f'<a href="#{section.key}">{html.escape(section.title)}</a>' for section in page.sections),
        sections="\n".join(_section(section) for section in page.sections),
        facts=_facts(page.facts),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        data=script_json({key: _drawn(figure) for key, figure in figures.items()}),
        script="\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


def to_csv(item: Figure | Table) -> str:
    """The item's data with a head line; floats with nine significant digits, which any fp32 number reads back from."""
    columns, rows = item.table()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *([_rounded(value, 9) for value in row] for row in rows)])
    return text.getvalue()


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _drawn(figure: Figure) -> dict[str, Any]:
    """The figure as the script takes it: rounded to what a screen can show."""
    series = []
    for s in figure.series:
        values = {name: [_rounded(finite(v), 6) for v in getattr(s, name)] for name in ("x", "y", "low", "high")}
        series.append({"name": s.name, "kind": s.kind, "color": s.color, "dashed": s.dashed, **values})
    return {"title": figure.title, "rows": figure.rows, "x": asdict(figure.x), "y": asdict(figure.y), "series": series}


def _rounded(value: Any, digits: int) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _section(section: Section) -> str:
    items = "\n".join(_table(item) if isinstance(item, Table) else _figure(item, place) for item, place in placed(section.items))
    note = f"<p>{html.escape(section.note)}</p>" if section.note else ""
    grid = f'<div class="grid">{items}</div>'
    head = f'<div class="head"><h2>{html.escape(section.title)}</h2>{note}</div>'
    if section.folded:
        return f'<section id="{section.key}"><details><summary>{head}</summary>{grid}</details></section>'
    return f'<section id="{section.key}">{head}{grid}</section>'


def placed(items: Sequence[Figure | Table]) -> list[tuple[Figure | Table, str]]:
    """Each item with its place: "left" and "right" share a row, "wide" has one, and so has who would stand alone on the left."""
    found: list[tuple[Figure | Table, str]] = []
    for item in items:
        if isinstance(item, Table) or item.wide:
            place = "wide"
        else:
            place = "right" if found and found[-1][1] == "left" else "left"
        if place == "wide" and found and found[-1][1] == "left":
            found[-1] = (found[-1][0], "wide")
        found.append((item, place))
    if found and found[-1][1] == "left":
        found[-1] = (found[-1][0], "wide")
    return found


def _caption(item: Figure | Table) -> str:
    link = f"data:text/csv;charset=utf-8,{quote(to_csv(item), safe=',:;()|+=/*')}"
    note = f"<p>{html.escape(item.note)}</p>" if item.note else ""
    return (
        f'<figcaption><div><h3>{html.escape(item.title)}</h3><a class="csv" download="{item.key}.csv" href="{link}" '
        f'aria-label="Data of {html.escape(item.title)} as CSV">CSV</a></div>{note}</figcaption>'
    )


def _figure(figure: Figure, place: str) -> str:
    return (
        f'<figure class="figure {place}" id="{figure.key}">{_caption(figure)}<div class="plot" data-figure="{figure.key}"></div></figure>'
    )


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col" class="{"text" if c.format == "text" else "number"}" aria-sort="none">'
        f'<button type="button" title="{html.escape(c.note)}">{html.escape(c.label)}</button></th>'
        for c in table.columns
    )
    rows = "".join(f"<tr>{''.join(_cell(value, c.format) for value, c in zip(row, table.columns, strict=True))}</tr>" for row in table.rows)
    return (
        f'<figure class="figure wide" id="{table.key}">{_caption(table)}<div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></figure>"
    )


def _cell(value: Any, form: Any) -> str:
    """The cell as it reads, with the number it sorts by."""
    plain = finite(value)
    kind = "text" if form == "text" else "number"
    order = "" if plain is None else html.escape(str(plain))
    return f'<td class="{kind}" data-value="{order}">{html.escape(shown(plain, form))}</td>'


def _lines(kind: str, tone: str, **texts: str) -> str:
    inner = "".join(f'<div class="{name} {tone}">{html.escape(text)}</div>' for name, text in texts.items() if text)
    return f'<div class="{kind}">{inner}</div>'


def _facts(facts: Mapping[str, Any]) -> str:
    flat = flatten(facts)
    lines = [f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(_plain(value))}</dd></div>" for name, value in flat.items()]
    return f'<section id="facts"><h2>How it was made</h2><dl>{"".join(lines)}</dl></section>' if lines else ""


def flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as dotted names."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        flat |= {f"{key}.{inner}": item for inner, item in flatten(value).items()} if isinstance(value, Mapping) else {key: value}
    return flat


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)
