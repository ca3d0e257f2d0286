#!/usr/bin/env python
"""Every field of the configuration as one table.

python tools/config_table.py > docs/configuration.md
python tools/config_table.py --check       # exits 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from megatron_rl.config import Config
from megatron_rl.fields import default_of, field_docs, type_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

Made by `python tools/config_table.py > docs/configuration.md` from `megatron_rl/config.py`.

`train`, `sft`, `eval`, `check` and `rollout serve` take YAML files with any part of this tree (`--config FILE.yaml`, several times if you
like), and single fields (`--optimizer.lr 1e-4`). They are merged from left to right and later ones win; `--print_config` shows the result,
which is itself a file for `--config`. Lists and mappings are given as YAML: `--corrections '[{name: tis, params: {cap: 2.0}}]'`.
A method's own parameters stand in `megatron-rl methods show NAME`.

| field | values | default | meaning |
|---|---|---|---|
"""


def rows(cls: type, prefix: str = "") -> Iterator[str]:
    """One line a field, sections in order."""
    hints, docs = get_type_hints(cls), field_docs(cls)
    for field in fields(cls):
        default, name = default_of(field), f"{prefix}{field.name}"
        if is_dataclass(default):
            yield from rows(type(default), f"{name}.")
            continue
        kind = type_text(hints[field.name]).replace("|", "\\|")
        yield f"| `{name}` | {kind} | `{json.dumps(default)}` | {docs[field.name]} |"


def main() -> int:
    """Prints the page, or compares it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with docs/configuration.md")
    page = HEAD + "\n".join(rows(Config)) + "\n"
    if not parser.parse_args().check:
        print(page, end="")
        return 0
    if PAGE.read_text() == page:
        return 0
    print("docs/configuration.md is out of date: python tools/config_table.py > docs/configuration.md", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
