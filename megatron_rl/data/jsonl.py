"""Reading files of JSON lines, with errors that name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rows(path: str | Path, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every non-empty line.

    Raises:
        ValueError: the file is missing, a line is not a JSON object, or one of the `required` keys is absent or neither text
            nor number.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such file; check the path")
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error}); every line must be one object") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: {row!r} is not an object with the keys {', '.join(required)}")
            for key in required:
                value = row.get(key)
                if not isinstance(value, str | int | float) or isinstance(value, bool):
                    raise ValueError(f"{where}: {key!r} is {value!r}; it must be text or a number")
            yield number, row
