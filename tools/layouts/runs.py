"""Runs many cases, with one start of the ranks a number of processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.families.tiny import make_tiny
from tools.layouts.launch import torchrun
from tools.layouts.matrix import SECONDS_A_CASE, Case
from tools.layouts.replays import DENSE_STAGE, MODELS, ReplayCase
from tools.make_tiny_moe import TinyModel, make_tiny_moe

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 120
"""What the processes may take to come up on a busy machine."""


def make_models(folder: Path) -> None:
    """The policy, a reference that differs from it, and the models that replay is watched in."""
    make_tiny_moe(folder / "model")
    make_tiny_moe(folder / "reference", TinyModel(seed=1))
    for name in (*MODELS, DENSE_STAGE):
        make_tiny(name, folder / name)


def run_cases(folder: Path, cases: Iterable[Case | ReplayCase], *, launch: Callable[..., str] = torchrun) -> dict[str, Any]:
    """What `worker.measure` or `watch.watched` found, by the case's name.

    Args:
        folder: `make_models` filled it.
        launch: starts the ranks, called as `launch.torchrun` is.

    Raises:
        LaunchError: a rank failed or hung.
    """
    found: dict[str, Any] = {}
    ordered = list(dict.fromkeys(cases))
    for processes in sorted({case.where.processes for case in ordered}):
        mine = [(type(case).__name__, dataclasses.asdict(case)) for case in ordered if case.where.processes == processes]
        out = folder / f"results_{processes}.json"
        launch(
            WORKER,
            str(folder),
            json.dumps(mine),
            str(out),
            processes=processes,
            timeout=START_SECONDS + SECONDS_A_CASE * len(mine),
        )
        found |= json.loads(out.read_text())
    return found
