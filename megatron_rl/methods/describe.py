"""What a person wants to read of a method: its formula, and each parameter with default and meaning, taken from the source itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from .catalog import METHODS
from .objective import Method


@dataclass(frozen=True)
class Parameter:
    """One field of a method's parameter class."""

    name: str
    type: str
    default: Any
    doc: str
    """Meaning and unit."""


def formula(method: Method) -> str:
    """The docstring of the method's own file: formula, paper, evidence, caveats."""
    module = sys.modules[f"{__package__}.{method.name}"]
    assert METHODS[method.name] is method and module.__doc__, "a method's file is named after it and says what it does"
    return module.__doc__


def parameters(method: Method) -> list[Parameter]:
    """The method's parameters in order."""
    docs: dict[str, str] = {}
    for cls in reversed(method.config.__mro__):
        if dataclasses.is_dataclass(cls):
            docs |= _field_docs(cls)
    return [
        Parameter(f.name, str(f.type), f.default_factory() if callable(f.default_factory) else f.default, docs.get(f.name, ""))
        for f in dataclasses.fields(method.config)
    ]


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each annotated field in the class's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            assert isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs
