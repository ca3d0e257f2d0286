"""A rejected step leaves nothing behind: weights, masters, moments, rates and random states are those before it, to the last bit.

The worker compares update, take, update, restore, update with a run that never took the step in the middle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_ranks

pytestmark = pytest.mark.dist

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "fp32": {},
        "bf16": {"dtype": "bfloat16"},
        "no moments yet": {"before": 0},
        "bf16, no moments yet": {"dtype": "bfloat16", "before": 0},
    },
    2: {
        "TP2 EP2": {"parallel": {"tensor": 2, "expert": 2}},
        "DP2": {},
        "DP2 bf16, no moments yet": {"dtype": "bfloat16", "before": 0},
    },
}


@pytest.mark.parametrize("processes", CASES)
def test_a_rejected_step_leaves_nothing_behind(tiny_moe: Path, processes: int) -> None:
    output = run_ranks("rollback.py", str(tiny_moe), json.dumps(CASES[processes]), processes=processes)
    for name in CASES[processes]:
        assert f"passed: {name}\n" in output
