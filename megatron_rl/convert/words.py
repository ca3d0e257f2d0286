"""What `convert inspect` and `convert verify` found, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .inspection import Description
from .mcore_inspection import CheckpointDescription
from .verify import LogitsReport, Report

SHOWN = 20
"""Of a long list, how many lines are for people; --json has them all."""


def description(found: Description | CheckpointDescription) -> str:
    """A line a fact, then the tensors."""
    facts = {name: value for name, value in asdict(found).items() if name != "tensors" or isinstance(value, int)}
    lines = [f"{name:<18} {_value(value)}" for name, value in facts.items()]
    if isinstance(found, CheckpointDescription):
        shown = [f"{t.dtype:<9} {'x'.join(map(str, t.shape)):<20} in {t.pieces:>4} pieces  {t.key}" for t in found.tensors]
        lines += ["", f"{len(found.tensors)} tensors", *_cut(shown)]
    return "\n".join(lines)


def verification(report: Report) -> str:
    """What differs, and whether that is too much."""
    w = report.weights
    lines = [f"{w.tensors} tensors, {w.parameters:,} parameters; each once on both sides, in the same shape"]
    lines += [f"sha256 {side} {checksum}" for side, checksum in zip("AB", w.checksums, strict=True)]
    if w.rounded:
        lines.append(f"{w.rounded} tensors are in another dtype, and equal when rounded to the narrower one")
    lines.append(f"{len(w.different)} tensors differ" if w.different else "no other tensor differs" if w.rounded else "no tensor differs")
    lines += _cut([f"  {d.name}: {d.dtypes[0]} and {d.dtypes[1]}, max |d| {d.max_abs:.3g}" for d in w.different])
    if report.logits is not None:
        lines += _logits(report.logits, report.bound)
    return "\n".join([*lines, "PASSED" if report.passed else "FAILED"])


def _logits(found: LogitsReport, bound: float) -> Iterator[str]:
    yield f"logits: A by {found.engines[0]}, B by {found.engines[1]}, in fp32; the largest |logit| is {found.largest_logit:.4g}"
    for number, (largest, mean) in enumerate(zip(found.max_abs, found.mean_abs, strict=True)):
        worst = max(range(len(largest)), key=largest.__getitem__)
        yield (
            f"  prompt {number}: {len(largest)} positions, max |d| {largest[worst]:.3g} at position {worst}, "
            f"mean |d| {sum(mean) / len(mean):.3g}"
        )
    if found.routes_agreement:
        yield "  tokens routed alike, by layer: " + " ".join(f"{share:.4f}" for share in found.routes_agreement)
    yield f"  largest difference / largest |logit| = {found.share:.3g}, bound {bound:.3g}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _cut(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"... and {more} more; --json lists all"] if more > 0 else [])]
