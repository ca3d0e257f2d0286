"""What is written below the fields of a dataclass: the text behind `--help`, `methods show` and docs/configuration.md."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, Field, fields
from textwrap import dedent
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of a dataclass, on one line; "" where there is none. Inherited fields included."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(part):
            found |= _own_docs(part)
    return {f.name: found.get(f.name, "") for f in fields(cls)}


def _own_docs(cls: type) -> dict[str, str]:
    definition = ast.parse(dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(following, ast.Expr)):
            continue
        if isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def default_of(field: Field[Any]) -> Any:
    """The value a field takes when none is given; `dataclasses.MISSING` where one must be."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def type_text(hint: Any) -> str:
    """A type as a user writes its values: `a | b` for choices, `null` for None, names without modules."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (Union, UnionType):
        return " | ".join(type_text(part) for part in arguments)
    if hint is type(None):
        return "null"
    name = getattr(origin or hint, "__name__", str(hint))
    inner = [type_text(part) for part in arguments if part is not Ellipsis]
    if name == "tuple":
        return f"list of {inner[0]}"
    if name == "Mapping":
        return "mapping"
    return f"{name}[{', '.join(inner)}]" if inner else name
