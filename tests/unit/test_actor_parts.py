"""The actor's small parts: what layers are chosen, how the learning rate moves, how metrics add up, how attention unpacks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.actor.attention import Slots
from megatron_rl.actor.metrics import Metrics, mismatch
from megatron_rl.actor.model import choose_implementation, detect_implementation
from megatron_rl.actor.optimizer import learning_rate, set_learning_rate
from megatron_rl.config import OptimizerConfig
from megatron_rl.types import as_metric


@pytest.mark.parametrize(
    ("machine", "layers", "grouped", "says"),
    [
        ((True, True, True), "transformer_engine", True, "CUDA with Transformer Engine and apex"),
        ((True, True, False), "transformer_engine", True, "CUDA with Transformer Engine"),
        ((True, False, False), "local", False, "install it for speed"),
        ((False, True, True), "local", False, "no CUDA"),
        ((False, False, False), "local", False, "no CUDA"),
    ],
)
def test_the_layers_are_the_best_the_machine_has(machine: tuple[bool, bool, bool], layers: str, grouped: bool, says: str) -> None:
    cuda, engine, apex = machine
    chosen = choose_implementation(cuda=cuda, transformer_engine=engine, apex=apex)
    assert (chosen.layers, chosen.grouped_gemm) == (layers, grouped)
    assert chosen.fused == grouped, "fused kernels come with Transformer Engine"
    assert says in str(chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a machine without CUDA")
def test_this_machine_takes_local_layers() -> None:
    assert str(detect_implementation()) == "local layers, sequential experts, plain kernels (no CUDA)"


def test_learning_rate_by_hand() -> None:
    base = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4}
    linear = OptimizerConfig(**base, decay="linear")
    assert [learning_rate(linear, s, 14) for s in (0, 1, 3)] == [0.25, 0.5, 1.0]
    assert learning_rate(linear, 4, 14) == 1.0
    assert learning_rate(linear, 9, 14) == pytest.approx(0.55)  # half way from 1 to 0.1
    assert learning_rate(linear, 14, 14) == learning_rate(linear, 99, 14) == pytest.approx(0.1)
    cosine = OptimizerConfig(**base, decay="cosine")
    assert learning_rate(cosine, 9, 14) == pytest.approx(0.55)
    assert learning_rate(cosine, 6, 14) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 5)))
    assert learning_rate(OptimizerConfig(**base), 50, 14) == 1.0


def test_a_groups_own_multiplier_survives() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 0.0, "lr_mult": 0.1}])
    set_learning_rate(optimizer, 2.0)  # type: ignore[arg-type]
    assert [g["lr"] for g in optimizer.param_groups] == [2.0, pytest.approx(0.2)]


def test_metrics_add_up_over_micro_batches() -> None:
    metrics = Metrics()
    metrics.add({"m": as_metric(torch.tensor(3.0), 2.0)}, {"loss": torch.tensor(0.5)}, {"top": torch.tensor(1.0)})
    metrics.add({"m": as_metric(torch.tensor(1.0), 6.0)}, {"loss": torch.tensor(0.25)}, {"top": torch.tensor(-4.0)})
    other = Metrics().add({"m": as_metric(torch.tensor(0.0), 0.0), "n": as_metric(torch.tensor(1.0), 1.0)})
    metrics.merge(other)
    # a mean of all tokens, not a mean of the micro-batches' means (1.5 and 1/6)
    assert metrics.means == {"m": (4.0, 8.0), "n": (1.0, 1.0)}
    assert metrics.totals == {"loss": 0.75}
    assert metrics.maxima == {"top": 1.0}


def test_mismatch_by_hand_and_blind_to_padding() -> None:
    logp, behaviour = torch.tensor([-1.0, -2.0, 5.0]), torch.tensor([-1.5, -2.0, torch.nan])
    means, maxima = mismatch(logp, behaviour, torch.tensor([True, True, False]), "x")
    # d = (0.5, 0): k3 = e^0.5 - 1.5 and 0
    assert [float(v) for v in means["mismatch/mean_abs_x"]] == [0.5, 2.0]
    assert float(means["mismatch/k3_x"][0]) == pytest.approx(math.exp(0.5) - 1.5)
    assert float(maxima["mismatch/max_abs_x"]) == 0.5
    assert mismatch(logp, behaviour, torch.zeros(3, dtype=torch.bool), "x")[1] == {}


def test_each_position_finds_its_sequence_and_offset() -> None:
    slots = Slots(torch.tensor([0, 3, 4, 6], dtype=torch.int32))
    assert (slots.row_T.tolist(), slots.column_T.tolist()) == ([0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1])
    x_THD = torch.arange(6.0).view(6, 1, 1)
    assert slots.unpack(x_THD).flatten(1).tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert slots.pack(slots.unpack(x_THD)).equal(x_THD)
