"""The grid: which conditions a configuration asks for, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Dtype, ParallelConfig
from .config import SHORT, EngineConfig, LabConfig, layout_name
from .records import Condition


@dataclass(frozen=True)
class Pass:
    """Conditions that are scored with one set of weights in one actor."""

    parallel: ParallelConfig
    dtype: Dtype
    lag: int = 0
    quantised: bool = False
    """With the engine's fake-quantised weights."""


def passes(config: LabConfig) -> list[Pass]:
    """Every actor and weight version that is needed; one actor's next to each other, its lag 0 first."""
    main = config.grid.dtypes[0]
    found = []
    for dtype in config.grid.dtypes:
        found.append(Pass(config.parallel, dtype))
        if dtype == main or config.grid.lag_dtypes == "all":
            found += [Pass(config.parallel, dtype, lag) for lag in config.lag.lags]
        if dtype == main:
            found.append(Pass(config.parallel, dtype, quantised=True))
    return found + [Pass(layout, main) for layout in config.grid.layouts]


def conditions(config: LabConfig, one: Pass, engine: EngineConfig, moe_layers: int) -> list[Condition]:
    """What is scored of an engine's tokens in one pass, live first.

    Args:
        moe_layers: of the model; 0 for a dense one, which routes nothing.
    """
    if (one.parallel != config.parallel and engine != config.main) or (one.quantised and engine.quantisation is None):
        return []
    return list(_conditions(config, one, engine, moe_layers))


def _conditions(config: LabConfig, one: Pass, engine: EngineConfig, moe_layers: int) -> Iterator[Condition]:
    dtype = SHORT[one.dtype]
    after = f" lag {one.lag}" if one.lag else ""
    after += f" {engine.quantisation} weights" if one.quantised else ""
    after += f" {layout_name(one.parallel)}" if one.parallel != config.parallel else ""

    def condition(replay: str, layers: tuple[int, ...] | None = None, what: str = "") -> Condition:
        name = f"{'live' if replay == 'none' else replay} {dtype}{what}{after}"
        return Condition(name, replay, dtype, layout_name(one.parallel), one.lag, layers, one.quantised)  # type: ignore[arg-type]

    yield condition("none")  # R2 replays what it chooses, and a dense model has nothing else
    if not moe_layers:
        return
    if "R2" in config.grid.replay and one.lag:
        yield condition("R2")
    if "R3" not in config.grid.replay:
        return
    yield condition("R3")
    plain = one == Pass(config.parallel, config.grid.dtypes[0])
    if plain and engine == config.main and config.grid.layers:
        for layer in range(0, moe_layers, config.grid.layers):
            yield condition("R3", (layer,), f" layer {layer}")
            if 0 < layer < moe_layers - 1:
                yield condition("R3", tuple(range(layer + 1)), f" layers 0-{layer}")
