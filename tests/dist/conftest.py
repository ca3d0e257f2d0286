"""The runs that `test_actor_parity.py`, `test_layouts.py` and `test_replay_layouts.py` share: one start a number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import test_actor_parity
from tests.dist.launch import run_forked
from tools.layouts import replays
from tools.layouts.matrix import METHODS, SPECIAL, oracle, quick
from tools.layouts.runs import make_models, run_cases


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny policy, a reference, and the models that replay is watched in."""
    folder = Path(tmp_path_factory.mktemp("layouts"))
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def runs(models: Path) -> dict[str, Any]:
    """What `tools.layouts.worker` says of each case, by its name."""
    compared = [*map(oracle, METHODS | SPECIAL), *test_actor_parity.EQUAL, *test_actor_parity.DIFFERENT, *quick()]
    return run_cases(models, [*compared, *replays.quick(), *replays.faults()], launch=run_forked)
