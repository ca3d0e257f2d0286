"""What follows from a restricted vocabulary for masks and metrics, by hand. The restriction itself is tested with the log-softmax."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.methods import registry

from .packs import Outcome, evaluate, make, stack

INSIDE = torch.tensor([True, True, False, True])
KEPT = torch.tensor([1.0, 0.9, 0.8, 0.9], dtype=torch.float64)


def run(name: str, params: dict, tool: int | None = None, objective: str = "policy_gradient") -> Outcome:
    """REINFORCE with A = 1 over two answers of four and one token; the third label of the first is outside the support."""
    mask = torch.ones(4, dtype=torch.bool)
    if tool is not None:
        mask[tool] = False
    first = make(torch.full((4,), -1.0, dtype=torch.float64), inside=INSIDE, kept_mass=KEPT, mask=mask)
    second = make(torch.full((1,), -1.0, dtype=torch.float64))
    return evaluate(stack(objective, {"weight": "none"}, [(name, params)], "seq-mean-token-sum"), [first, second], padding=2)


@pytest.mark.parametrize(
    ("name", "params", "kept"),
    [
        ("dvp", {"support": "unpruned", "reach": "token"}, [1, 1, 0, 1]),
        ("dvp", {"support": "unpruned", "reach": "suffix"}, [1, 1, 0, 0]),
        ("dvp", {"support": "unpruned", "reach": "sequence"}, [0, 0, 0, 0]),
        ("dvp", {"support": "engine"}, [1, 1, 1, 1]),
        ("dvp", {"support": "engine", "reach": "sequence"}, [1, 1, 1, 1]),
        ("dvp", {"support": "keep_sets"}, [1, 1, 1, 1]),
        ("keep_sets", {}, [1, 1, 1, 1]),
    ],
)
def test_what_a_label_outside_takes_with_it(name: str, params: dict, kept: list[float]) -> None:
    """Rejected tokens stay in the denominator of two answers; the other answer is never touched."""
    outcome = run(name, params)
    assert (-2 * outcome.grads[0]).tolist() == kept
    assert (-2 * outcome.grads[1]).tolist() == [1]
    assert outcome.metrics[f"{name}/kept_share"] == (sum(kept) + 1) / 5
    assert outcome.metrics[f"{name}/outside_share"] == 1 / 5
    assert outcome.metrics[f"{name}/kept_mass_mean"] == pytest.approx((1 + 0.9 + 0.8 + 0.9 + 1) / 5)
    assert outcome.metrics[f"{name}/pruned_mass_square_mean"] == pytest.approx((0.01 + 0.04 + 0.01) / 5)


def test_a_tool_token_outside_the_support_takes_nothing_with_it() -> None:
    outcome = run("dvp", {"support": "unpruned", "reach": "suffix"}, tool=2)
    assert (-2 * outcome.grads[0]).tolist() == [1, 1, 0, 1]
    assert outcome.metrics["dvp/outside_share"] == 0


def test_only_one_restriction_at_a_time() -> None:
    with pytest.raises(ValueError, match="methods: dvp and keep_sets both restrict the vocabulary"):
        registry.build(ObjectiveConfig("ppo"), [], [MethodConfig("dvp"), MethodConfig("keep_sets")])
