"""What a picture of a method shows, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Colour = Literal[1, -1, 0]
"""1 and -1 are the signs of the advantage, or of what stands in for it; 0 where it plays no part."""
COLOURS: Mapping[Colour, str] = {1: "A = +1", -1: "A = −1", 0: "any A"}


@dataclass(frozen=True)
class Line:
    """One curve."""

    x: NDArray[np.floating[Any]]
    y: NDArray[np.floating[Any]]
    """NaN where there is nothing to draw."""
    colour: Colour
    dash: int = 0
    """Which pattern: 0 solid, 1 dashed, 2 dotted."""
    label: str = ""
    """Of the dash, for the legend."""


@dataclass(frozen=True)
class Chart:
    """Everything on a picture. Labels may hold matplotlib's $mathematics$."""

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    y_range: tuple[float, float] | None = None
    colours: Mapping[Colour, str] = field(default_factory=lambda: COLOURS)
    """What each colour is called in the legend; one that is missing stays out of it."""
    drawstyle: Literal["default", "steps-mid"] = "default"
    """steps-mid for what is counted."""


class Picture(Protocol):
    """Knows what to draw of a method, and what a reader must know of it."""

    @property
    def caption(self) -> str:
        """Markdown; "" for none."""
        ...

    def chart(self, name: str) -> Chart:
        """Asks the method of that name."""
        ...
