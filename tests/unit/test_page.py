"""Pages as data: what stands in the HTML and the CSV, without a browser. tests/browser looks at the same in one."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from megatron_rl.page.figure import Axis, Card, Column, Figure, Page, Section, Series, Table, slug
from megatron_rl.page.html import flatten, placed, render, to_csv, write_page
from megatron_rl.page.numbers import number, percent, shown

LINE = Series("a, b", [1, 2, 3], [0.5, math.nan, np.float32(0.25)])
FAN = Series("fan", [1], [None], "band", low=[-1.0], high=[2.0])
NARROW, WIDE = Figure("one", "One", "", [LINE]), Figure("two", "Two", "", [LINE], wide=True)
TABLE = Table("methods", "Methods", "Note", [Column("Name", "text"), Column("Kept", "percent")], [["ppo", 0.25], ["<b>", None]])


def page(*items: Figure | Table) -> Page:
    return Page("a<b", "sub", [Card("Reward", "0.5", "up", "good")], [Section("s", "Section", "", items)], {"model": {"path": "x"}, "n": 1})


def parsed(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def data_of(text: str) -> dict[str, object]:
    """The figures' data as the page's script reads it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(re.search(r'id="data">(.*?)</script>', text).group(1), parse_constant=refuse)  # type: ignore[union-attr]


def test_csv_has_a_row_a_point_and_bounds_where_a_series_has_them() -> None:
    assert parsed(to_csv(Figure("k", "K", "", [LINE], Axis("step"), Axis("mean k3, nats")))) == [
        ["series", "step", "mean_k3_nats"],
        ["a, b", "1", "0.5"],
        ["a, b", "2", ""],  # not a number is nothing
        ["a, b", "3", "0.25"],
    ]
    assert parsed(to_csv(Figure("k", "K", "", [FAN]))) == [["series", "step", "value", "low", "high"], ["fan", "1", "", "-1.0", "2.0"]]
    assert parsed(to_csv(TABLE)) == [["name", "kept"], ["ppo", "0.25"], ["<b>", ""]]


def test_any_fp32_number_reads_back_from_csv() -> None:
    values = np.random.default_rng(0).standard_normal(50).astype(np.float32) ** 9
    rows = parsed(to_csv(Figure("k", "K", "", [Series("s", list(range(50)), values.tolist())])))
    assert [np.float32(row[2]) for row in rows[1:]] == list(values)


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    out = write_page(page(NARROW, TABLE), tmp_path / "report.html")
    text = out.read_text()
    assert "<title>a&lt;b · megatron_rl</title>" in text
    assert not re.search(r"(src|href|action)=[\"'](?!data:|#)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == ["methods.csv", "one.csv"]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_links_data_is_the_csv_file(tmp_path: Path) -> None:
    text = write_page(page(NARROW, TABLE), tmp_path / "report.html").read_text()
    links = dict(re.findall(r'download="([^"]+)" href="data:text/csv;charset=utf-8,([^"]*)"', text))
    assert {name: unquote(data) for name, data in links.items()} == {path.name: path.read_text() for path in (tmp_path / "csv").iterdir()}


def test_figures_travel_as_json_and_text_cannot_leave_its_place() -> None:
    evil = Figure("evil", "</script><b>", "<i>", [Series("</script>", [1], [math.inf])])
    text = render(page(evil))
    assert data_of(text)["evil"]["series"] == [  # type: ignore[index]
        {"name": "</script>", "kind": "line", "color": 0, "dashed": False, "x": [1], "y": [None], "low": [], "high": []}
    ]
    assert text.count("</script>") == 2
    assert "<i>" not in text.replace("document", "")
    assert "&lt;/script&gt;&lt;b&gt;" in text


def test_a_cell_reads_for_people_and_sorts_by_its_number() -> None:
    text = render(page(TABLE))
    assert '<td class="number" data-value="0.25">25.0\u202f%</td>' in text
    assert '<td class="number" data-value="">–</td>' in text
    assert html.escape("<b>") in text
    assert text.count('aria-sort="none"') == 2


@pytest.mark.parametrize(
    ("items", "places"),
    [
        ([NARROW], ["wide"]),  # alone in its row
        ([NARROW, NARROW], ["left", "right"]),
        ([NARROW, NARROW, NARROW], ["left", "right", "wide"]),
        ([NARROW, WIDE, NARROW, NARROW], ["wide", "wide", "left", "right"]),
        ([NARROW, TABLE], ["wide", "wide"]),
        ([], []),
    ],
)
def test_no_figure_stands_beside_a_hole(items: list[Figure | Table], places: list[str]) -> None:
    assert [place for _, place in placed(items)] == places
    assert [item for item, _ in placed(items)] == items


def test_two_figures_of_one_name_would_overwrite_each_others_csv(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="one key"):
        write_page(page(NARROW, NARROW), tmp_path / "report.html")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.0, "2.00"),
        (0.0012, "0.00120"),
        (-0.5, "−0.500"),
        (123456.0, "1.23×10⁵"),
        (1690.6, "1,691"),
        (2.54e-5, "2.54×10⁻⁵"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_read_with_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_and_counts() -> None:
    assert [percent(x) for x in (0.0, 0.00004, 0.0008, 0.347, 1.0)] == [f"{x}\u202f%" for x in ("0", "0.0040", "0.08", "34.7", "100.0")]
    assert [shown(v, f) for v, f in ((4007, "integer"), (1.5, "seconds"), ("x", "number"), (None, "text"))] == ["4,007", "1.50 s", "x", "–"]  # type: ignore[arg-type]


def test_facts_are_listed_under_dotted_names() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
    assert "<dt>model.path</dt><dd>x</dd>" in render(page(NARROW))


def test_slug() -> None:
    assert slug("k3, R3 & lag 2") == "k3_r3_lag_2"
