"""The browser that pages are looked at in. Without one the tests are skipped: apt-get install chromium, or playwright install chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with playwright.sync_playwright() as tool:
        own = tool.chromium.executable_path
        path = next((found for name in NAMES if (found := shutil.which(name))), own if Path(own).is_file() else None)
        if path is None:
            pytest.skip("no Chromium or Chrome on this machine: apt-get install chromium, or playwright install chromium")
        found = tool.chromium.launch(executable_path=path, args=["--no-sandbox"])  # the sandbox refuses root
        yield found
        found.close()
