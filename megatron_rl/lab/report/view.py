"""One engine setting as the figures see it: its tokens, its numbers, and which of its conditions the reader is to look at first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...page.figure import slug
from ..attribution import log_ratio
from ..records import Sampled

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """An engine setting with its part of the summary (`megatron_rl.lab.summary`)."""

    sample: Sampled
    numbers: Mapping[str, Any]
    prefix: str = ""
    """Stands before the keys of its figures, since a page may show several engine settings."""

    @property
    def name(self) -> str:
        """The engine setting's."""
        return self.sample.engine.name

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Numbers by condition."""
        return self.numbers["conditions"]

    @cached_property
    def whole(self) -> list[str]:
        """The conditions that replay all layers or none."""
        return [name for name in self.conditions if self.sample.rescored[name].condition.replayed_layers is None]

    @property
    def live(self) -> str:
        """The condition in which the trainer's routers choose, with the engine's weights; of a dense model the first."""
        return self.numbers["routed"] or self.whole[0]

    @cached_property
    def replayed(self) -> str | None:
        """The same with the engine's routes."""
        c = self.sample.rescored[self.live].condition
        same = {"dtype": c.dtype, "layout": c.layout, "lag": c.lag, "quantised": c.quantised}
        found = self.sample.find(replay="R3", replayed_layers=None, **same)
        return None if found is None else found.condition.name

    @property
    def trained(self) -> list[str]:
        """The conditions that training would see; the one it would see without replay comes first."""
        return sorted(self.numbers["trained"], key=lambda name: self.sample.rescored[name].condition.replay != "none")

    @cached_property
    def compared(self) -> list[str]:
        """The conditions whose tokens are drawn: live and replayed with the engine's weights, then those that training would see."""
        wanted = [self.live, *([] if self.replayed is None else [self.replayed]), *self.trained]
        return list(dict.fromkeys(wanted))[:6]

    @property
    def explained(self) -> str | None:
        """The condition whose attribution is drawn: the first that training would see and that could be attributed."""
        return next((n for n in [*self.trained, self.live, *self.whole] if self.conditions[n]["attribution"] is not None), None)

    def color(self, name: str) -> int:
        """A condition's colour, the same in every figure."""
        return self.compared.index(name)

    def floor(self, name: str) -> float | None:
        """A statistic's largest value between two scorings by the same weights."""
        return self.numbers["floor_worst"].get(name)

    def key(self, text: str) -> str:
        """A figure's key."""
        return f"{self.prefix}{slug(text)}"

    def log_ratios(self, name: str) -> Floats:
        """[M] log theta - log mu of the sampled tokens."""
        return log_ratio(self.sample, name)

    @cached_property
    def rest(self) -> Floats:
        """[M] 1 - p of the sampled tokens, p the engine's probability."""
        batch = self.sample.batch
        return -np.expm1(np.minimum(batch.mu_T[batch.mask_T].astype(np.float64), 0.0))
