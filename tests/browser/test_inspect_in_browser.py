"""The page of `lab inspect` in headless Chromium: it loads without network and without an error, is drawn, sorts, and can be read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from inspect_cases import TEXTS, record_answer

from megatron_rl.lab.inspect_html import write_html
from megatron_rl.lab.reading import read
from megatron_rl.record.store import FOLDER, Store
from tests.browser.opening import opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_one_answer(browser: Any, tmp_path: Path, scheme: str) -> None:
    record_answer(tmp_path)
    file = write_html(read(Store(tmp_path / FOLDER), "demo", 4, 0, TEXTS.__getitem__), tmp_path / "page.html")
    shown = opened(browser, file, scheme)
    page = shown.page
    assert shown.complaints == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [file.as_uri()]
    assert page.inner_text(".answer") == "1+1=2·<b>↵\n\\xe2"
    assert page.locator(".answer .flip").count() == 1
    assert "0.50000" in page.locator(".answer .tok").first.get_attribute("title")
    assert page.locator("#prefix_drift .plot path").count() > 0, "the drift is drawn"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))

    def shade(selector: str, what: str) -> float:
        """Mean of red, green and blue."""
        found = page.eval_on_selector(selector, f"e => getComputedStyle(e).{what}")
        return sum(float(x) for x in found.split("(")[1].rstrip(")").split(",")[:3]) / 3

    assert abs(shade(".prompt", "color") - shade(".answer", "backgroundColor")) > 80, "grey, but legible"
    heads = page.locator("#tokens th button")
    heads.nth([text.strip() for text in heads.all_text_contents()].index("d")).click()
    assert page.locator("#tokens tbody tr td:first-child").all_inner_texts() in (["3", "5", "2"], ["2", "5", "3"]), "by d: -0.01, 0, 0.5"
