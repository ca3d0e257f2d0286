"""What a person wants to read of a method first: the docstring of its own file, and how far its formula can be trusted."""

from __future__ import annotations

import re
import sys
from itertools import groupby

from .catalog import METHODS
from .objective import Kind, Method

EVIDENCE = {
    "F": "full paper text read",
    "C": "public reference code or official documentation read",
    "D": "detailed secondary description: notes, reviews, reproductions",
    "A": "abstract or introduction only",
    "I": "inferred here, not the paper's formula",
    "N": "paper not located: a labelled reconstruction",
}
"""The tags of papers.md in words."""

_LABELS = {"N": "[N] paper not located", "I": "[I] partly inferred", "A": "[A] full text not read"}

_FIELDS: dict[Kind, str] = {"objective": "objective", "correction": "corrections", "penalty": "corrections", "advantage": "advantage"}


def formula(method: Method) -> str:
    """Formula, paper, evidence and caveats, as the method's file states them."""
    module = sys.modules[f"{__package__}.{method.name}"]
    assert METHODS[method.name] is method and module.__doc__, "a method's file is named after it and says what it does"
    return module.__doc__


def evidence_words(method: Method) -> dict[str, str]:
    """Each of the method's tags with its meaning."""
    return {tag: EVIDENCE[tag] for tag in method.evidence}


def label(method: Method) -> str | None:
    """What must stand beside the name of a formula that is not the paper's own or was not read in it; None where it is."""
    return next((text for tag, text in _LABELS.items() if tag in method.evidence), None)


def evidence_note(method: Method) -> str:
    """What the file says of its evidence: which part is whose. "" where it says no more than the tags."""
    found = re.search(r"Evidence (.+?)(?:\n\n|\Z)", formula(method), re.DOTALL)
    note = " ".join(found[1].split()) if found else ""
    return note if re.sub(r"\[[FCDAIN]\]|[\s.]", "", note) else ""


def paragraphs(method: Method) -> list[tuple[str, bool]]:
    """The docstring in pieces, each with whether it is prose, then on one line. Formulas are indented or end without a full stop."""
    parts = [
        "\n".join(lines)
        for paragraph in formula(method).strip().split("\n\n")
        for _, lines in groupby(paragraph.strip("\n").split("\n"), key=lambda line: line.startswith("    "))
    ]
    prose = [not p.startswith(" ") and p.rstrip().endswith(".") for p in parts]
    return [(" ".join(p.split()) if is_prose else p, is_prose) for p, is_prose in zip(parts, prose, strict=True)]


def caveats(method: Method) -> list[str]:
    """The prose of the docstring after its first paragraph, which says what the method is."""
    return [text for text, is_prose in paragraphs(method)[1:] if is_prose]


def config_field(method: Method) -> str:
    """The field of the configuration that names it."""
    return _FIELDS.get(method.kind, "methods")
