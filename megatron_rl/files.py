"""Files that are there whole or as they were, whatever ends the process that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file beside its place and moves it there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data.encode() if isinstance(data, str) else data)
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """As `write_whole`, readable by people."""
    write_whole(path, json.dumps(value, indent=1) + "\n")
