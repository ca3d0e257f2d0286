"""Checkpoints of two ranks under every layout, brought to another; with optimizer state; and an export that waits in vain.

Two workers, started once, observed by every test.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tools.families.tiny import make_tiny

pytestmark = pytest.mark.dist

LAYOUTS = ("", "tensor=2", "expert=2", "pipeline=2", "tensor=2 expert=2")
"""With two ranks, "" is data parallelism."""
OPTIMIZER_TOUR = ("tensor=2 expert=2", "pipeline=2", "tensor=2", "expert=2", "", "tensor=2 expert=2")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the workers saw, with a Qwen2-MoE that has a shared expert, a dense layer and biases."""
    folder = tmp_path_factory.mktemp("reshard")
    make_tiny("qwen2-moe", folder / "model")
    (folder / "out").mkdir()
    arguments = [str(folder / "model"), str(folder / "out"), json.dumps(LAYOUTS), json.dumps(OPTIMIZER_TOUR)]
    run_ranks("reshard.py", *arguments, processes=2)
    return json.loads((folder / "out" / "seen.json").read_text())


@pytest.mark.parametrize("pair", [f"{a} > {b}" for a, b in itertools.pairwise([*LAYOUTS, LAYOUTS[0]])])
def test_any_layout_becomes_another(seen: dict[str, Any], pair: str) -> None:
    """Round a ring: a checkpoint says nothing of the layout it was written under, so what reads one of them reads all."""
    assert seen["weights"][pair] == []


def test_a_resharded_checkpoint_exports_in_shared_files(seen: dict[str, Any]) -> None:
    """The ranks wrote files in turn; together they are the folder that everything came from."""
    assert seen["weights"]["back"] == []
    assert len(seen["weights"]["files"]) >= 4


@pytest.mark.parametrize("stop", range(len(OPTIMIZER_TOUR) - 1))
def test_optimizer_state_survives_every_layout(seen: dict[str, Any], stop: int) -> None:
    words, different, tensors = seen["optimizer"]["trained"][stop]
    assert words == OPTIMIZER_TOUR[stop + 1] and different == []
    # Weights, and two moments and a master copy of each: four times as many, less what has no optimizer.
    assert tensors > 3 * len(seen["optimizer"]["weights only"])


def test_weights_only_leaves_the_optimizer_out(seen: dict[str, Any]) -> None:
    assert not [key for key in seen["optimizer"]["weights only"] if key.startswith("optimizer")]


def test_training_goes_on_as_if_it_had_stayed(seen: dict[str, Any]) -> None:
    assert seen["optimizer"]["second step"] == 0.0


def test_what_megatron_cannot_divide_is_refused_by_name(seen: dict[str, Any]) -> None:
    assert "num_experts" in seen["refusals"]["experts"] or "expert" in seen["refusals"]["experts"]
    assert "layers" in seen["refusals"]["layers"]


def test_a_rank_that_does_not_come_is_a_timeout_that_names_the_tensors(seen: dict[str, Any]) -> None:
    message = seen["timeout"]["message"]
    assert "gathering decoder.layers." in message and "from ranks [1] on rank 0 failed on rank 0" in message
    assert "imed out" in message
