"""Metrics of a step that depend on the clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics but how long it took."""
    return {k: v for k, v in row.items() if not k.startswith("seconds/") and k not in ("time", "tokens_per_second")}
