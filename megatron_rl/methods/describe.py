"""What a person wants to read of a method first: the docstring of its own file."""

from __future__ import annotations

import sys

from .catalog import METHODS
from .objective import Method


def formula(method: Method) -> str:
    """Formula, paper, evidence and caveats, as the method's file states them."""
    module = sys.modules[f"{__package__}.{method.name}"]
    assert METHODS[method.name] is method and module.__doc__, "a method's file is named after it and says what it does"
    return module.__doc__
