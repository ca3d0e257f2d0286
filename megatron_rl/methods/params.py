"""What the frozen parameter classes of all methods share: types checked on construction, errors that name field, value and remedy."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Params:
    """Base of a method's parameters.

    Raises:
        ValueError: a value of another type than the field's, or outside the field's choices.
    """

    where: ClassVar[str] = "params"
    """The configuration path that errors name."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            if not _fits(value, hints[f.name]):
                raise ValueError(f"{self.where}.{f.name}: {value!r} does not fit; use {_describe(hints[f.name])}")

    def require(self, name: str, condition: bool, remedy: str) -> None:
        """Raises ValueError naming the field and its value unless the condition holds."""
        if not condition:
            raise ValueError(f"{self.where}.{name}: {getattr(self, name)!r} {remedy}")


class ObjectiveParams(Params):
    """Base of an objective's parameters."""

    where: ClassVar[str] = "objective.params"


class CorrectionParams(Params):
    """Base of a correction's or penalty's parameters."""

    where: ClassVar[str] = "corrections.params"


class MethodParams(Params):
    """Base of the parameters of vocabulary, data, step and schedule methods."""

    where: ClassVar[str] = "methods.params"


def build(cls: type, params: Mapping[str, Any], field: str, owner: str) -> Any:
    """An instance of the parameter class `cls` from a user's mapping.

    Raises:
        ValueError: a key that the class does not have, or a value that it refuses.
    """
    known = [f.name for f in fields(cls)]
    for key in params:
        if key not in known:
            raise ValueError(f"{field}.{key}: {owner} has no such parameter; it has: {', '.join(known) or 'none'}")
    return cls(**params)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in get_args(hint))
    if origin is Literal:
        return " or ".join(str(choice) for choice in get_args(hint))
    if hint is float:
        return "a number"
    return "null" if hint is type(None) else {int: "an integer", bool: "true or false"}.get(hint, getattr(hint, "__name__", str(hint)))
