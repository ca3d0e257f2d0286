"""Which combinations of layout, recomputation and micro-batches replay is watched in, and what must have been seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

from tools.layouts.matrix import LAYOUTS, RECOMPUTE, Layout, Recompute

MODELS = ("qwen3-moe", "deepseek-v3")
"""Each with a dense layer; the second with shared experts, sigmoid scores, a bias and groups of experts."""
DENSE_STAGE = "moonlight"
"""Its first two of four layers are dense: in two stages, the first has no router."""
STAGED = ("PP2", "CP2xPP2")
MICRO_BATCHES = (1, 4)


@dataclass(frozen=True)
class ReplayCase:
    """One training step under watch."""

    layout: str | None
    """A key of `LAYOUTS`; None is one process."""
    recompute: Recompute
    micro_batches: int
    """The interleaved schedule takes whole rounds of the pipeline, 2 instead of 1."""
    model: str = MODELS[0]
    """A key of `tools.families.tiny.TINY`."""
    fault: Literal["none", "rows", "layers", "micro-batches"] = "none"
    """What is put wrong between the leader and the routers, to see that the watch sees it."""

    @property
    def where(self) -> Layout:
        """The layout."""
        return LAYOUTS[self.layout] if self.layout else Layout(1)

    @property
    def name(self) -> str:
        """As results are keyed."""
        broken = "" if self.fault == "none" else f", wrong {self.fault}"
        return f"{self.model} on {self.layout or 'one process'}, recompute {self.recompute}, {self.micro_batches} micro-batches{broken}"


def full() -> list[ReplayCase]:
    """Every layout x kind of recomputation x number of micro-batches x model, one process included; and stages without a router."""
    of_models = [ReplayCase(at, r, n, m) for at in (None, *LAYOUTS) for r in RECOMPUTE for n in MICRO_BATCHES for m in MODELS]
    return of_models + [ReplayCase(at, r, 4, DENSE_STAGE) for at in STAGED for r in RECOMPUTE]


def quick() -> list[ReplayCase]:
    """Every layout with 1 and 4 micro-batches; kinds of recomputation and models take turns, so that each meets every kind of split.

    Without recomputation there is only what every case does before: the forward.
    """
    kinds: Iterator[Recompute] = cycle(("full", "selective"))
    models = cycle((MODELS[0], MODELS[1], MODELS[1], MODELS[0]))
    turns: list[tuple[str, Recompute, str]] = [(layout, next(kinds), next(models)) for layout in LAYOUTS]
    turns.append(("PP2xVPP2", "full", MODELS[1]))
    return [
        *(ReplayCase(layout, kind, n, model) for layout, kind, model in turns for n in MICRO_BATCHES),
        ReplayCase("PP2", "full", 4, DENSE_STAGE),
    ]


def faults() -> list[ReplayCase]:
    """Runs that must be found wrong."""
    return [
        ReplayCase("TP2xEP2", "full", 1, MODELS[1], fault="rows"),
        ReplayCase("PP2", "full", 1, MODELS[1], fault="layers"),
        ReplayCase("PP2xVPP2", "full", 4, MODELS[1], fault="micro-batches"),
    ]


def problem(case: ReplayCase, seen: Mapping[str, Any]) -> str | None:
    """What is wrong with what was seen; None where every router did as it was told, once for each token."""
    again = 0 if case.recompute == "none" else 1
    if seen["wrong"]:
        return f"{seen['wrong']} of {seen['rows']} rows routed otherwise than given, such as {seen['examples'][0]}"
    for kind, times in (("scored", 1), ("forward", 1), ("recomputed", again)):
        if seen[kind] != [times]:
            return f"tokens were {kind} {seen[kind]} times in some layer, not {times}"
    rounds = max(case.micro_batches, case.where.parallel.get("virtual_pipeline", 1))
    if seen["micro_batches"] != rounds:
        return f"{seen['micro_batches']} micro-batches instead of {rounds}"
    if not seen["moved"]:
        return "not every rank saw every token's router scores move with the weights"
    return None
