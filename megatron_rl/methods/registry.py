"""From names in a configuration to a `Stack`. `catalog.METHODS` lists the names."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import MethodConfig, ObjectiveConfig
from .catalog import METHODS
from .objective import Kind, Method
from .params import build as build_params
from .stack import STACKED, Part, Stack


def lookup(name: str, kinds: tuple[Kind, ...], field: str) -> Method:
    """The method of that name, of one of these kinds.

    Raises:
        ValueError: names the field, the value, and what there is.
    """
    method = METHODS.get(name)
    if method is None or method.kind not in kinds:
        known = ", ".join(sorted(m.name for m in METHODS.values() if m.kind in kinds))
        other = f" ({name} is a {method.kind}): name it under {STACKED.get(method.kind, 'methods')}" if method else ""
        raise ValueError(f"{field}: {name!r} is not a known {' or '.join(kinds)}{other}; choose one of: {known}")
    return method


def build(objective: ObjectiveConfig, corrections: Sequence[MethodConfig], methods: Sequence[MethodConfig] = ()) -> Stack:
    """The stack a configuration names.

    Args:
        corrections: corrections and penalties.
        methods: vocabulary restrictions, and data-, step- and schedule-level methods.

    Raises:
        ValueError: an unknown method or parameter, one method twice, or two vocabulary restrictions.
    """
    method = lookup(objective.name, ("objective",), "objective.name")
    stacked = _parts(corrections, "corrections", ("correction", "penalty"))
    others = _parts(methods, "methods", ("vocabulary", "data", "step", "schedule"))
    vocabulary = [part for part in others if part.method.kind == "vocabulary"]
    if len(vocabulary) > 1:
        names = " and ".join(part.method.name for part in vocabulary)
        raise ValueError(f"methods: {names} both restrict the vocabulary; keep one")
    return Stack(
        objective=Part(method, build_params(method.config, objective.params, "objective.params", method.name)),
        corrections=tuple(part for part in stacked if part.method.kind == "correction"),
        aggregation=objective.aggregation or method.aggregation,
        penalties=tuple(part for part in stacked if part.method.kind == "penalty"),
        vocabulary=vocabulary[0] if vocabulary else None,
        others=tuple(part for part in others if part.method.kind != "vocabulary"),
    )


def _parts(configured: Sequence[MethodConfig], where: str, kinds: tuple[Kind, ...]) -> list[Part]:
    parts: list[Part] = []
    for i, one in enumerate(configured):
        field = f"{where}[{i}]"
        method = lookup(one.name, kinds, f"{field}.name")
        if any(part.method is method for part in parts):
            raise ValueError(f"{field}.name: {method.name!r} is stacked twice; its effect would be applied twice. Remove one")
        parts.append(Part(method, build_params(method.config, one.params, f"{field}.params", method.name)))
    return parts
