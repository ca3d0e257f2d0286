"""A recorded answer made up for the tests of `lab inspect`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_rl.record.recorder import Recorder
from megatron_rl.record.store import FOLDER, About
from megatron_rl.routing.payloads import RouteKind
from megatron_rl.types import Batch, Origin, Prompt, Trajectory

TEXTS = ("1+", "1=", "2", " <b>", "\n", "\\xe2")
"""By id."""
D = (0.5, -0.01, 0.0)
"""Of the three sampled tokens."""


def record_answer(run: Path) -> None:
    """One answer in step 4: a prompt of two tokens, one of a tool, three sampled; probed, and routed otherwise once."""
    mask = np.array([False, False, True, True, False, True])
    mu = np.where(mask, -1.0, np.nan).astype(np.float32)
    where = np.where(mask, 0, -1).astype(np.int32)
    routes = np.tile(np.array([[0, 1], [2, 7]], np.uint8), (5, 1, 1))
    answer = Trajectory(
        Prompt("train:5", np.array([0, 1], np.int32), "1+1=", "2"), "g", np.arange(6, dtype=np.int32), mask, mu, where + mask * 3, where,
        routes, "stop", "2 <b>", reward=1.0, origin=Origin(4, 0, 0, 0),
    )  # fmt: skip
    batch = Batch((answer,), (np.where(mask, 0.25, 0).astype(np.float32),))
    old, flips = mu.copy(), np.full(6, np.nan, np.float32)
    old[mask] += np.array(D, np.float32)
    flips[mask] = (2, 0, 0)
    About({"model": {"path": str(run / "gone")}}, 1, 1, {}).save(run / FOLDER)
    recorder = Recorder(run / FOLDER, 0, limit=2**30, kind=RouteKind(8, 2, 2, "set"))
    recorder.sampled([answer], "train")
    recorder.batch(4, batch)
    recorder.scored(4, batch, flips=[flips])
    recorder.scored(4, batch, old=[old])
    recorder.close()
