"""A page in the browser, with all that it said and asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Opened:
    """A report in the browser, with all that it said and asked for."""

    page: Any
    file: Path
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def opened(browser: Any, file: Path, scheme: str = "light", width: int = 1280) -> Opened:
    """Loads the file, unfolds everything, and waits until each figure is drawn."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    report = Opened(context.new_page(), file)
    report.page.on("console", lambda message: report.complaints.append(message.text))
    report.page.on("pageerror", lambda error: report.complaints.append(str(error)))
    report.page.on("request", lambda request: report.requests.append(request.url))
    report.page.goto(file.as_uri())
    report.page.wait_for_selector("html[data-ready]")
    report.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    report.page.wait_for_function("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.marks'))")
    return report
