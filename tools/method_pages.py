"""Writes docs/methods/NAME.md and docs/methods/plots/NAME.svg for every method of the catalog.

usage, from the repository's root: python -m tools.method_pages [--check] [NAME ...]

The pages come from what each method's file declares and says, the mathematics from method_docs/formulas.yaml, and the pictures from
running the methods (method_docs/pictures.py). Drawing needs matplotlib; --check compares the pages only and draws nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.listing import method_record, sorted_methods
from megatron_rl.methods import describe
from megatron_rl.methods.objective import Method
from tools.method_docs.pictures import PICTURES, WEIGHTS

FOLDER = Path(__file__).resolve().parents[1] / "docs/methods"
FORMULAS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "method_docs/formulas.yaml").read_text())
CAUTION = {
    "N": "The paper was not located. This is a reconstruction, **not the paper's method**.",
    "I": "Parts of this formula are inferred, **not the paper's**.",
    "A": "Of the paper only the abstract or introduction was read.",
}
NEEDS = {
    "old": "log-probs of the policy that the step started from; the engine's may stand in",
    "recomputed_old": "the trainer's own log-probs at the start of the step (`train.old_policy: recomputed`)",
    "turns": "the turn or step of every token (`data.step_delimiter`)",
    "behaviour_top_k": "the engine's likeliest tokens at every position",
    "old_top_k": "the likeliest tokens at the start of the step (`train.old_policy: recomputed`)",
    "uniform": "one uniform draw a token",
    "router_shift": "router scores of a mixture-of-experts model, now and at the start of the step",
    "reference": "a frozen reference policy (`reference.path`)",
    "min_p_sampling": "an engine that prunes alike (`rollout.min_p` equal to rho, and `rollout.keep_sets`)",
    "keep_sets": "the ids the truncated sampler could choose from (`rollout.keep_sets`)",
}
"""Each `objective.Need` in a page's words."""


def page(method: Method) -> str:
    """The whole page."""
    record = method_record(method)
    parameters = [param["name"] for param in record["params"]]
    parts = [f"# {method.name}", f"{method.summary}.", _caution(method), _facts(method, record), _formula(method, parameters)]
    parts += [_parameters(record), _use(method, record), _caveats(method), _picture(method)]
    source = f"megatron_rl/methods/{method.name}.py"
    parts.append(f"Code: [`{source}`](../../{source}). Page and picture are made by `python -m tools.method_pages`.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _caution(method: Method) -> str:
    """A box on top of what is not the paper's or was not read in it."""
    lines = [f"> **[{tag}]** {text}" for tag, text in CAUTION.items() if tag in method.evidence]
    note = describe.evidence_note(method)
    if lines and note:
        lines.append(f"> Evidence: {_plain(note)}")
    return "\n>\n".join(["> [!CAUTION]\n" + lines[0], *lines[1:]]) if lines else ""


def _facts(method: Method, record: dict[str, Any]) -> str:
    rows = {
        "kind": method.kind,
        "unit": method.unit,
        "paper": re.sub(r"\b(\d{4}\.\d{5})\b", r"[arXiv:\1](https://arxiv.org/abs/\1)", method.paper),
        "evidence": "<br>".join(f"[{tag}] {words}" for tag, words in record["evidence_words"].items()),
        "aggregation": f"`{record['aggregation']}`, unless `objective.aggregation` says otherwise" if record["aggregation"] else "",
        "needs": "<br>".join(NEEDS[need] for need in record["needs"]) or "nothing beyond the behaviour log-probs",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items() if value)])


def _formula(method: Method, parameters: list[str]) -> str:
    """LaTeX with its letters explained; the docstring's own formula where there is none."""
    entry = FORMULAS["methods"].get(method.name)
    if entry is None:
        text = "\n\n".join(text for text, is_prose in describe.paragraphs(method) if not is_prose)
        return f"## Formula\n\n```text\n{text}\n```"
    blocks = list(entry["formula"])
    if method.kind == "objective":
        blocks.append(FORMULAS["aggregations"][method.aggregation])
    mathematics = "\n\n".join(f"```math\n{block}\n```" for block in blocks)
    return f"## Formula\n\n{mathematics}\n\n{_letters(blocks, entry.get('where', {}), parameters)}".rstrip()


def _letters(blocks: list[str], own: dict[str, str], parameters: list[str]) -> str:
    """What each letter means: the method's own first, then the shared ones that occur, in a formula or in such an explanation."""
    symbols: dict[str, str] = {symbol: words for symbol, words in FORMULAS["symbols"].items() if symbol not in own}
    texts, found = list(blocks), set[str]()
    while new := {symbol for symbol in symbols.keys() - found if _occurs(symbol, texts)}:
        found |= new
        texts += [symbols[symbol] for symbol in new]
    named = {symbol: _code(words, parameters) for symbol, words in own.items()}
    lines = (f"* ${symbol}$: {words}" for symbol, words in (named | {s: symbols[s] for s in symbols if s in found}).items())
    return re.sub(r"\$([^$]+)\$", r"$`\1`$", "\n".join(lines))  # so fenced, GitHub takes no underscore for emphasis


def _code(words: str, parameters: list[str]) -> str:
    """Parameters' names set as code, outside of mathematics and of what is code already."""
    names = "|".join(map(re.escape, parameters)) or "$^"
    pieces = re.split(r"(\$[^$]*\$|`[^`]*`)", words)
    return "".join(piece if i % 2 else re.sub(rf"(?<![\w.])({names})(?!\w)", r"`\1`", piece) for i, piece in enumerate(pieces))


def _occurs(symbol: str, blocks: list[str]) -> bool:
    """Whether a letter stands in a formula, with j in place of t as its index too."""
    letter = re.escape(symbol).replace("_t", "_[tj]")
    return any(re.search(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", block) for block in blocks)


def _parameters(record: dict[str, Any]) -> str:
    if not record["params"]:
        return "## Parameters\n\nNone."
    head = ["## Parameters", "", "| name | values | default | meaning |", "|---|---|---|---|"]
    rows = []
    for param in record["params"]:
        cells = (f"`{param['name']}`", param["type"], f"`{json.dumps(param['default'])}`", param["doc"])
        rows.append("| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(head + rows)


def _use(method: Method, record: dict[str, Any]) -> str:
    """The configuration that selects it, with every default written out."""
    params = {param["name"]: param["default"] for param in record["params"]}
    choice: dict[str, Any] = {"name": method.name, **({"params": params} if params else {})}
    field = record["configured_in"]
    tree = {field: choice if field in ("objective", "advantage") else [choice]}
    text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=False)
    return f"## Use\n\nDefaults written out; leave out what you do not change.\n\n```yaml\n{text}```"


def _caveats(method: Method) -> str:
    prose = describe.caveats(method)
    return "## Caveats\n\n" + "\n".join(f"* {_plain(text)}" for text in prose) if prose else ""


def _picture(method: Method) -> str:
    picture = PICTURES.get(method.name)
    if picture is None:
        return "## Picture\n\nNone: it puts no weight on a token."
    alt = f"{method.name}: " + ("weight against log-ratio" if method.name in WEIGHTS else "what it does")
    return "\n\n".join(part for part in ("## Picture", f"![{alt}](plots/{method.name}.svg)", picture.caption) if part)


def _plain(text: str) -> str:
    """Prose that Markdown must not take for tags or emphasis."""
    return re.sub(r"(?<!`)\*(?!`)", r"\\*", text).replace("<", "&lt;")


def write(method: Method) -> None:
    """The page and, where there is one, the picture."""
    from tools.method_docs.plots import draw

    (FOLDER / "plots").mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{method.name}.md").write_text(page(method))
    if method.name in PICTURES:
        draw(PICTURES[method.name].chart(method.name), FOLDER / "plots" / f"{method.name}.svg")


def stale(methods: list[Method]) -> list[str]:
    """Names whose page differs from what would be written, or whose picture is missing."""

    def fresh(method: Method) -> bool:
        path = FOLDER / f"{method.name}.md"
        drawn = method.name not in PICTURES or (FOLDER / "plots" / f"{method.name}.svg").is_file()
        return path.is_file() and path.read_text() == page(method) and drawn

    return [method.name for method in methods if not fresh(method)]


def main() -> int:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these methods; all when left out")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date or a picture is missing")
    options = parser.parse_args()
    methods = [method for method in sorted_methods() if not options.names or method.name in options.names]
    if unknown := set(options.names) - {method.name for method in methods}:
        parser.error(f"no such method: {', '.join(sorted(unknown))}")
    if options.check:
        if old := stale(methods):
            print(f"out of date: {', '.join(old)}; run: python -m tools.method_pages {' '.join(old)}", file=sys.stderr)
        return int(bool(old))
    for method in methods:
        write(method)
    return 0


if __name__ == "__main__":
    sys.exit(main())
