"""Writes the "Modules" section of docs/architecture.md from the first sentence of each module's docstring.

usage: python tools/module_map.py [--check]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
HEADING = "## Modules\n"


def first_sentence(path: Path) -> str:
    """The docstring's first sentence on one line; fails where there is no docstring."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path.relative_to(ROOT)} has no docstring"
    paragraph = " ".join(text.split("\n\n")[0].split())
    head, stop, _ = paragraph.partition(". ")
    return head + "." if stop else paragraph.removesuffix(".") + "."


def section() -> str:
    """One line a module, by package."""
    lines = [HEADING]
    for folder in [ROOT / "megatron_rl", *sorted(p for p in (ROOT / "megatron_rl").rglob("*") if p.is_dir())]:
        modules = sorted(p for p in folder.glob("*.py") if p.name not in ("__init__.py", "__main__.py"))
        if modules:
            lines.append(f"\n### {folder.relative_to(ROOT)}\n")
            lines += [f"* `{m.name}` {first_sentence(m)}" for m in modules]
    return "\n".join(lines) + "\n"


def main() -> None:
    page = PAGE.read_text()
    wanted = page.split(HEADING)[0] + section()
    if "--check" in sys.argv[1:]:
        if page != wanted:
            sys.exit("docs/architecture.md is out of date; run: python tools/module_map.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
